"""Operations on a tape: what each costs forward, what it saves, and what its backward costs."""
