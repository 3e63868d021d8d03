"""Scripts as far as they say arguments: what a shell would hand on, and nothing that it would run."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec.convert.megatron.shell import read_script
from trainledger.spec.convert.megatron.shell_values import LONGEST

SCRIPT = r"""#!/bin/bash
# a comment with an apostrophe: don't
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8; NUM_NODES=${SLURM_NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
NAME='a $QUOTED name'
ARGS=(
    --num-layers 32   # layers
    --hidden-size 4096
    --lr 1.5e-4
)
if [ -n "$DRY" ]; then
  ARGS+=(--dry-run)
fi
MORE="
    --micro-batch-size 1 \
    --bf16
"
cat <<EOF2
don't read "this
EOF2
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES} pretrain_gpt.py "${ARGS[@]}" ${MORE} \
  --tag=$NAME 2>&1 | tee log
"""


def test_arrays_defaults_arithmetic_and_continued_lines_are_put_together() -> None:
    found = read_script(SCRIPT)
    launch = next(each for each in found.commands if "pretrain_gpt.py" in each)
    assert launch[:6] == ("torchrun", "--nproc_per_node", "8", "--nnodes", "2", "pretrain_gpt.py")
    assert launch[6:12] == ("--num-layers", "32", "--hidden-size", "4096", "--lr", "1.5e-4")
    assert {"--micro-batch-size", "1", "--bf16"} <= set(launch)
    assert "--dry-run" not in launch
    assert found.variables["WORLD_SIZE"] == "16"
    assert found.variables["NAME"] == "a $QUOTED name"
    assert not any("this" in word for each in found.commands for word in each)


@pytest.mark.parametrize(
    "line",
    [
        "ARGS='--a 1 --b two'; echo $ARGS --c",
        'A=3; B="$A"; echo --x ${B}4 $((A*2+1)) ${C:-none}',
        "LIST=(--one 1 --two 2); LIST+=(--three); echo ${LIST[@]}",
        'export N=2\necho "--n" $N \\\n  --last',
        "X=1; X=2 # again\necho $X",
    ],
)
def test_words_are_those_that_a_shell_hands_on(line: str) -> None:
    printed = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, env=dict(os.environ))
    last = read_script(line).commands[-1]
    assert last[0] == "echo"
    assert list(last[1:]) == printed.stdout.split()


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "made"
    found = read_script(f"N=$(touch {mark}); M=`touch {mark}`; echo --num-layers $N $M $((`touch {mark}`))")
    assert not mark.exists()
    assert found.variables["N"] == "$(...)"


def test_variables_that_contain_themselves_do_not_grow_without_end() -> None:
    found = read_script("A=xxxxxxxxxx\n" + 'A="$A$A"\n' * 60 + "echo $A")
    assert all(len(each) <= LONGEST for each in found.variables.values())


def test_what_is_not_set_stays_as_it_is_written() -> None:
    assert read_script('A="${TP} $PP $((TP * 2)) $((8 / 0))"').variables["A"] == "${TP} $PP $((TP * 2)) $((8 / 0))"


@given(st.text(alphabet="AB=\"'$(){}[]@#\\`\n ;|&<>-+*/0123456789:ab", max_size=200))
def test_any_text_is_read(text: str) -> None:
    for command in read_script(text).commands:
        assert command
