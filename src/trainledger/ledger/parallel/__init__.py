"""How a run is spread over devices: the plan of a rank, one file for each kind of parallelism, and collectives."""
