"""One run in every form that its arguments come in, hostile texts, and sentences for what is wrong."""

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from megatron_cases import arguments_of, read_cases

from trainledger.spec.convert.megatron import Arguments, from_arguments, read_arguments, read_file
from trainledger.spec.convert.megatron.arguments import LARGEST
from trainledger.spec.problem import InvalidInput

CASES = {each["case"]: each for each in read_cases()}
# The cases of Megatron-LM's tests whose arguments are a run here; the page of memory lists the others with the reason.
DECODERS = [name for name in CASES if name.startswith(("gpt/", "moe/", "mixtral/"))]


def _table(arguments: Arguments) -> object:
    try:
        return from_arguments(arguments, devices=128).table
    except InvalidInput as error:
        return [str(each) for each in error.problems]


def _as_words(values: dict[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        words.append(f"--{name}")
        if value is not True:
            words += [f"'{value}'" if " " in str(value) or "*" in str(value) or "|" in str(value) else str(value)]
    return words


@pytest.mark.parametrize("case", DECODERS)
def test_the_arguments_of_real_tests_are_one_run_in_every_form(case: str) -> None:
    row = CASES[case]
    values = {name: value for name, value in json.loads(row["args"]).items() if "[" not in str(value)}
    expected = _table(arguments_of({**row, "args": json.dumps(values)}))
    words = _as_words(values)
    environment = json.loads(row["env"] or "{}")
    exports = "".join(f"export {name}={value}\n" for name, value in environment.items() if "\\" not in str(value))
    launched = f"{exports}torchrun --nproc_per_node 8 pretrain_gpt.py {' '.join(words)}"
    scripted = f"{exports}ARGS=(\n{chr(10).join(words)}\n)\ntorchrun pretrain_gpt.py ${{ARGS[@]}}"
    tested = yaml.safe_dump({
        "ENV_VARS": environment, "MODEL_ARGS": {f"--{name}": value for name, value in values.items()},
    })  # fmt: skip
    assert _table(read_arguments(launched)) == expected
    assert _table(read_arguments(scripted)) == expected
    assert _table(read_arguments(tested, "model_config.yaml")) == expected


def test_the_log_of_a_run_is_its_arguments() -> None:
    """As Megatron-LM prints them when it starts, those that are not given as well, each line with its rank."""
    given = (
        "accumulate_allreduce_grads_in_fp32=True add_bias_linear=False apply_rope_fusion=True "
        "attention_dropout=0.0 bf16=True ffn_hidden_size=14336 global_batch_size=128 "
        "group_query_attention=True hidden_dropout=0.0 hidden_size=4096 max_position_embeddings=8192 "
        "micro_batch_size=1 normalization=RMSNorm num_attention_heads=32 num_experts=None num_layers=32 "
        "num_query_groups=8 padded_vocab_size=128256 pipeline_model_parallel_size=1 "
        "position_embedding_type=rope rotary_base=500000 seq_length=8192 swiglu=True "
        "tensor_model_parallel_size=2 train_iters=1000 untie_embeddings_and_output_weights=True "
        "use_distributed_optimizer=True world_size=64 "
    )
    pairs = (each.split("=") for each in given.split())
    lines = [f"0:   {name} {'.' * (50 - len(name))} {value}" for name, value in pairs]
    begin, end = "0: ------------------------ arguments ----------", "0: -------------------- end of arguments ----"
    text = "\n".join(["[rank0] starting", begin, *lines, end, "  num_layers ............ 7", "step 1"])
    found = read_arguments(text)
    run = from_arguments(found)
    assert (found.devices, found.complete, run.supplied) == (64, True, {})
    assert run.table["model"]["n_layers"] == 32
    assert run.table["model"]["attention"] == {"n_heads": 32, "n_kv_heads": 8}
    assert run.table["layout"]["shard"] == 32
    import trainledger as tl

    assert tl.parameters(tl.load(run.table).model).total == 8_030_261_248


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no arguments of Megatron-LM"),
        ("python train.py --model x", "has no arguments of Megatron-LM"),
        ("--num-layers many --hidden-size 8", "--num-layers = 'many': must be a whole number of at least 1"),
        ("--num-layers -3 --hidden-size 8", "--num-layers = '-3': must be a whole number of at least 1"),
        ("--num-layers $L --hidden-size 8", "--num-layers = '$L': names a variable that the text does not set"),
        ("--num-layers 1e400 --hidden-size 8", "must be a whole number"),
        ("--num-layers 2 --hidden-size 8", "--micro-batch-size: is missing, and Megatron-LM has no default for it"),
        ("--num-layers 2 --hidden-size 8 --lr fast", "--lr = 'fast': must be a number"),
        ("--num-layers 2 --hidden-size 8 --optimizer lamb", "--optimizer = 'lamb': must be one of adam"),
        ("--num-layers 2 --hidden-size 8 --hybrid-layer-pattern M*", "layers of state space models"),
        ("python pretrain_t5.py --num-layers 2 --hidden-size 8", "pretrain_t5.py trains an encoder and a decoder"),
        (
            "--num-layers 2 --hidden-size 8 --tokenizer-type TikTokenizer",
            "nearest that works: --set model.vocab_size=32000",
        ),
    ],
)
def test_what_is_wrong_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_arguments(read_arguments(text), devices=8)
    assert sentence in str(caught.value)


def test_the_number_of_devices_is_asked_for_where_nothing_says_it() -> None:
    text = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
        "--max-position-embeddings 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    with pytest.raises(InvalidInput, match=r"cluster\.count: is not said by the arguments.*--count 8"):
        from_arguments(read_arguments(text))
    with pytest.raises(InvalidInput, match=r"must be a multiple of the 4 devices of a replica .*nearest that works: 8"):
        from_arguments(read_arguments(text), devices=6)
    assert from_arguments(read_arguments(text), devices=8).table["layout"]["replicate"] == 2


def test_what_is_not_understood_and_what_was_supplied_is_said() -> None:
    text = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --save /x "
        "--max-position-embeddings 64 --fancy-new-flag 3 --log-interval 10 --bf16"
    )
    run = from_arguments(read_arguments(text), devices=1)
    assert run.not_understood == ("fancy-new-flag",)
    assert run.supplied["hidden-dropout"] == 0.1
    assert "not understood: --fancy-new-flag" in run.remarks
    assert any(each.startswith("defaults of Megatron-LM: ") for each in run.remarks)


HOSTILE = {
    "bomb.yaml": "a: &a [x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 8)}]\n" for a, b in pairwise("abcdefghi")),
    "code.yaml": "MODEL_ARGS: !!python/object/apply:os.system ['touch /tmp/never']",
    "deep.yaml": "{a: " * 5000,
    "list.yaml": "- 1\n- 2",
    "numbers.yaml": "1: 2\n3.5: [4]\nnull: {--num-layers: {}}",
    "binary.sh": "\x00\x01\xff" * 100 + "--num-layers",
    "quotes.sh": "ARGS=\"--num-layers '2 --hidden-size 8",
    "escapes.log": "arguments ---\n  num_layers .... \x1b[31m2\n  hidden_size .... 8\n",
    "empty.txt": "",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_a_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(HOSTILE[name], encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        from_arguments(read_file(path), devices=8, where=str(path))
    assert str(caught.value).startswith(f"{path}:")
    assert "\x1b" not in str(caught.value)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.sh"
    path.write_bytes(b"#" * (LARGEST + 1))
    with pytest.raises(InvalidInput, match=f"is larger than {LARGEST:,} bytes"):
        read_file(path)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_file(tmp_path / "none.sh")


@given(
    st.lists(
        st.tuples(
            st.sampled_from((
                "num-layers", "hidden-size", "num-attention-heads", "micro-batch-size", "seq-length", "moe-layer-freq",
                "num-experts", "pipeline-model-parallel-layout", "pipeline-model-parallel-size", "kv-channels", "lr",
                "context-parallel-size", "expert-model-parallel-size", "num-layers-per-virtual-pipeline-stage",
                "window-size", "recompute-granularity", "step-batch-size-schedule", "global-batch-size", "fp8-format",
                "multi-latent-attention", "group-query-attention", "num-query-groups", "vocab-size", "swiglu", "bf16",
            )),
            st.one_of(
                st.integers(-3, 200).map(str), st.text(max_size=12), st.sampled_from(("t*2|tL", "([0]*1+[1]*1)"))
            ),
        ),
        max_size=24,
    )
)  # fmt: skip
def test_any_arguments_are_a_run_or_sentences(pairs: list[tuple[str, str]]) -> None:
    from trainledger.answers.load import load

    with suppress(InvalidInput):
        load(from_arguments(Arguments(dict(pairs)), devices=8).table)
