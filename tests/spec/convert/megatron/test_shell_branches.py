"""Branches, loops and functions of scripts: followed where the text decides, asked about where it does not."""

import subprocess

import pytest

from trainledger.spec.convert.megatron import from_arguments, read_arguments
from trainledger.spec.convert.megatron.shell import MOST_WAYS, read_script, ways_through
from trainledger.spec.problem import InvalidInput

LAUNCH = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $L --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --train-iters 10 --bf16"
)
PICK = "if [ $SIZE = small ]; then\n  L=12\nelif [ $SIZE = large ]; then\n  L=48\nfi\n"


@pytest.mark.parametrize(
    "script",
    [
        f"SIZE=small\n{PICK}",
        f"SIZE=large\n{PICK}",
        "L=4; if false; then L=16; fi",
        'L=1; [[ "$L" == 1 && 3 -gt 2 ]] && L=7 || L=9',
        "S=b; case $S in a|b) L=12;; *) L=48;; esac",
        "S=xl; case $S in [a-c]) L=1;; x*) L=3;; esac",
        "A=2; B=4; L=$((($A * $B) / (1 * 1) * 1))",
        "A=7; L=$((A > 5 && A != 6)); let L+=A%4; ((L++))",
        "L=-7; L=$((L / 2 + 8))",
        "L=${N:-12}; M=${K:=5}; L=$((L + K)); L=${L:+3}$L",
        "N=1; while [ $N -lt 20 ]; do N=$((N * 3)); [ $N -gt 20 ] && break; done; L=$N",
        "L=0; for i in 1 2 3; do if test $i -eq 2; then continue; fi; L=$((L + i)); done",
        "L=0; for ((i=0; i<4; i++)); do L=$((L+2)); done",
        "f() { local K=$1; L=$((K * $2)); return 0; L=1; }\nf 3 4",
        "function g { L=$#; }\ng a b c",
        "function g () { L=$#; }\ng a b c",
        "L=1; f() ( L=2; exit 0 )\nf; L=$((L + 3))",
        "L=1\nf ()\n(\n  L=2\n)\nf; (L=7; exit 0); L=$((L + 3))",
        "f() if [ $1 -gt 2 ]; then L=$1; else L=2; fi\nf 1; f 5",
        "f() for i in 1 2 3; do L=$i; done\nf",
        "f()\ncase $1 in a) L=1;; *) L=2;; esac\nf b",
        "A=(); A+=(4 8 12); L=${A[1]}; A+=(5); L=$((L + ${#A[@]} + A[3]))",
        'declare -A M=([small]=12 ["large"]=48); S=large; L=${M[$S]}',
        "L=3; : <<END\nL=5; if\nEND\nif ! [ -z $L ]; then { L=8; }; fi > /dev/null",
        "A='12 4'; set=1; if [[ -n $A && ( $set -eq 2 || $set -eq 1 ) ]]; then L=6; else L=7; fi",
    ],
)
def test_what_the_text_decides_is_followed_as_a_shell_does(script: str) -> None:
    """bash itself is the witness."""
    printed = subprocess.run(["bash", "-c", f"{script}\necho $L"], capture_output=True, text=True, check=True)
    (way,) = ways_through(f"{script}\necho $L")
    assert list(way.commands[-1]) == ["echo", *printed.stdout.split()]


@pytest.mark.parametrize("body", ["{{ {}; }}", "( {} )", "\n(\ncd x; {}\n)", "if true; then {}; fi"])
def test_the_launch_in_a_function_is_found_whatever_its_body_is(body: str) -> None:
    script = f"L=12\nlaunch() {body.format(LAUNCH)}\nlaunch\n"
    assert from_arguments(read_arguments(script)).table["model"]["n_layers"] == 12


@pytest.mark.parametrize(
    ("script", "value", "said"),
    [
        (PICK, "12 or 48", "L is set in lines 2 and 4; line 1 decides ($SIZE = small)"),
        ("L=12\nif nvidia-smi | grep -q H100; then L=48; fi\n", "12 or 48", "line 2 decides (grep -q H100)"),
        ("case $1 in\n a) L=1;;\n b) L=2;;\nesac\n", "1 or 2", "line 1 decides (case $1)"),
        ("L=12\n[ -f big ] && L=48\n", "48 or 12", "line 2 decides"),
        ("for L in 2 4; do\n", "2 or 4", "launches more than one run"),
    ],
)
def test_what_the_text_leaves_open_is_asked(script: str, value: str, said: str) -> None:
    end = "\ndone" if script.startswith("for") else ""
    with pytest.raises(InvalidInput) as refused:
        from_arguments(read_arguments(f"{script}{LAUNCH}{end}"))
    (problem,) = refused.value.problems
    assert (problem.field, problem.value) == ("--num-layers", value)
    assert said in problem.rule


@pytest.mark.parametrize(
    "script",
    [
        'L=12\n[ -z "$WANDB" ] && X=1\nif [ $# -gt 1 ]; then echo usage; exit 1; fi\n',
        '[ -z "$L" ] && L=12\n',
        "L=12; while [[ $# -gt 0 ]]; do case $1 in --layers) L=$2; shift 2;; esac; done\n",
        "mkdir -p out || exit 1\nL=12\nexport X=$(date)\nif [ $X = 3 ]; then T=1; fi\n",
    ],
)
def test_what_changes_no_run_is_not_asked(script: str) -> None:
    assert from_arguments(read_arguments(script + LAUNCH)).table["model"]["n_layers"] == 12


def test_a_file_that_is_sourced_is_named() -> None:
    run = from_arguments(read_arguments(f"source env.sh\nL=2\n{LAUNCH}"))
    assert run.notes[0] == "not opened, so that what they set is not known: env.sh"


def test_ways_loops_and_nesting_have_bounds() -> None:
    many = "".join(f"if [ $A = {place} ]; then B{place}=1; fi\n" for place in range(20))
    assert len(list(ways_through(many))) == MOST_WAYS
    assert read_script("while true; do A=1; done; f() { f; }; f; for i in 1; do i=$(($i*9)); done")
    with pytest.raises(InvalidInput, match="more than 50 commands in one another"):
        read_script("if true; then " * 60)
