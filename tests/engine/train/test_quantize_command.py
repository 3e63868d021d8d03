"""`trainledger quantize`: what 8 and 4 bits change of a model trained here, against torchao and the account."""

import json
import random
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainledger.cli import main
from trainledger.engine.data.tokenizer import ByteTokenizer
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.nn.weights import held
from trainledger.engine.train.quantized import FILE, Quantization, by_torchao, pack, read_quantized, unpack
from trainledger.engine.train.trained import Trained, find_weights, load_trained, write
from trainledger.ledger.serving import serving_rank, weight_bytes
from trainledger.spec.durable import parse_json, sha256, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.runfile import parse, read
from trainledger.spec.serving import Serving

pytest.importorskip("torchao")

RUN = """
[model]
vocab_size = 260
d_model = 32
n_layers = 2
max_seq_len = 32
attention.n_heads = 4
feed_forward.d_ff = 90
[recipe]
seq_len = 32
global_batch = 16
micro_batch = 16
steps = 120
learning_rate = 0.01
[data]
path = ["texts"]
cache = "{cache}"
validation_fraction = 0.3
"""
WORDS = (
    "the",
    "small",
    "brown",
    "dog",
    "often",
    "runs",
    "over",
    "hills",
    "and",
    "never",
    "sees",
    "birds",
    "near",
    "old",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run that has learned which word follows which, on texts of which some were held out."""
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "texts").mkdir()
    draw = random.Random(0)
    for number in range(40):
        at = [draw.randrange(len(WORDS))]
        for _ in range(60):
            at.append((at[-1] * 3 + draw.randrange(2)) % len(WORDS))
        (folder / "texts" / f"{number:02}.txt").write_text(" ".join(WORDS[each] for each in at))
    (folder / "run.toml").write_text(RUN.format(cache=folder / "cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "run.toml", "--set", f"data.path={folder}/texts"]) == 0
    return next((folder / "runs").iterdir())


@pytest.fixture(scope="module")
def written(run_dir):
    """What the verb says of 8 and of 4 bits, and the directories."""
    found = {}
    for bits, more in ((8, []), (4, ["--group-size", "32"])):
        words = ["quantize", str(run_dir), "--bits", str(bits), "--to", str(run_dir.parent.parent / f"q{bits}"), *more]
        with redirect_stdout(StringIO()) as out:
            assert main([*words, "--json"]) == 0
        found[bits] = json.loads(out.getvalue())
    return found


def hush(sentence):
    pass


def model_of(spec, seed=0):
    model = Transformer(spec)
    initialize(model, seed=seed)
    return model


def test_eight_bits_change_little_and_four_more(written):
    before = written[8]["before_perplexity"]
    assert before == written[4]["before_perplexity"] < 5  # of 260 bytes: it has learned
    eight, four = (written[bits]["after_perplexity"] / before - 1 for bits in (8, 4))
    assert abs(eight) < 0.005
    assert abs(eight) < four < 0.5
    assert 0 < written[4]["standard_error"] < written[4]["nats_per_token_change"]


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_written_is_evaluated_and_sampled(written, bits, capsys):
    assert main(["evaluate", written[bits]["directory"], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["perplexity"] == pytest.approx(written[bits]["after_perplexity"], rel=1e-6)
    assert [each["place"] for each in again["documents"]] == [each["place"] for each in written[bits]["documents"]]
    words = ["sample", written[bits]["directory"], "--prompt", "the small ", "--tokens", "20", "--temperature", "0"]
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["text"]) > len("the small ")


def test_the_document_says_sizes_and_losses(run_dir, written, tmp_path, capsys):
    assert main(["quantize", str(run_dir), "--bits", "8", "--to", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    shown = capsys.readouterr().out
    assert "int8: 8-bit integers, a 16-bit scale per row" in shown
    assert f"before          {math_of(written[8]['documents'], 'before_nats'):.4f}" in shown


def math_of(documents, name):
    return sum(each[name] for each in documents) / sum(each["tokens"] for each in documents)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_torchaos_bit_for_bit(run_dir, written, bits):
    quantization = Quantization(bits, written[bits]["group_size"])
    before, (after, _) = load_trained(run_dir, hush).model, read_quantized(run_dir.parent.parent / f"q{bits}")
    found, quantized = held(after), 0
    for name, weight in held(before).items():
        if name.endswith("_proj.weight"):
            expected = by_torchao(weight, quantization).dequantize()[:, : weight.shape[1]]
            assert not torch.equal(expected, weight)
            quantized += 1
        else:
            expected = weight.detach().to(torch.bfloat16).float()
        assert torch.equal(found[name], expected), name
    assert quantized == written[bits]["matrices"] == 14


SPECS = {
    "dense": {"feed_forward.d_ff": 90, "tie_embeddings": True, "attention.bias": True},
    "experts": {
        "feed_forward": {"kind": "experts", "d_ff": 48, "n_experts": 4, "per_token": 2, "n_shared": 1,
                         "n_dense_layers": 1, "router": {"scores": "sigmoid", "correction": True}},
    },
    "latent": {
        "attention": {"kind": "latent", "n_heads": 4, "kv_rank": 12, "q_rank": 20, "nope_head_dim": 8,
                      "rope_head_dim": 4, "v_head_dim": 6},
        "feed_forward.d_ff": 70,
    },
    "ahead": {"feed_forward.d_ff": 64, "n_mtp_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("quantization", [Quantization(8), *(Quantization(4, each) for each in (128, 64, 32))], ids=str)
def test_bytes_are_those_of_the_account(name, quantization, tmp_path):
    fields = SPECS[name] if "attention" in SPECS[name] else {"attention.n_heads": 4, **SPECS[name]}
    run = parse(
        {
            "model": {"vocab_size": 260, "d_model": 40, "n_layers": 2, "max_seq_len": 32, **fields},
            "recipe": {"seq_len": 16, "global_batch": 2, "steps": 4},
        }
    )
    trained = Trained(model_of(run.model), ByteTokenizer(), tmp_path)
    found = write(trained, tmp_path / "out", quantization, "bf16")
    serving = Serving(weights=quantization.format, compute="bf16")
    account = weight_bytes(serving_rank(run, serving).owned, serving)
    assert (found.codes, found.scales, found.whole) == (account.codes, account.scales, account.whole)
    stored = load_file(tmp_path / "out" / FILE)
    beside = sum(each.nbytes for name, each in stored.items() if name.endswith("correction"))
    assert beside == (16 if name == "experts" else 0)
    assert found.after == account.nbytes == sum(each.nbytes for each in stored.values()) - beside
    model = load_trained(tmp_path / "out", hush).model
    assert model.spec == run.model.served
    off = (model.lm_head.weight - trained.model.lm_head.weight).abs().max()
    assert off < 0.01 * trained.model.lm_head.weight.abs().max()


def test_two_codes_a_byte():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 1)[:, :15].contiguous()
    packed = pack(codes)
    assert packed.shape == (3, 8)
    assert packed[0, 0].item() == 0x98  # -8 low, -7 high
    assert torch.equal(unpack(packed, 15), codes)


def copied(written, folder, bits=4):
    return shutil.copytree(written[bits]["directory"], folder / "copy")


def test_damaged_files_are_sentences(written, tmp_path):
    directory = copied(written, tmp_path)
    data = bytearray((directory / FILE).read_bytes())
    data[-1] ^= 1
    (directory / FILE).write_bytes(data)
    with pytest.raises(InvalidInput, match=r"has a quantized.safetensors whose SHA-256 is not the manifest's"):
        load_trained(directory, hush)
    (directory / FILE).write_bytes(data[:-1])
    with pytest.raises(InvalidInput, match=r"has \d+ bytes in quantized.safetensors, and the manifest says"):
        load_trained(directory, hush)
    (directory / "manifest.json").unlink()
    with pytest.raises(InvalidInput, match=r"lacks manifest.json"):
        load_trained(directory, hush)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 5}, "has 5 bits in groups of 32"),
        ({"group_size": 33}, "has 4 bits in groups of 33"),
        ({"format": 9}, "has format 9, and this version reads 1"),
        ({"files": {}}, "has a manifest that lacks a file, or names another"),
        ({"files": {"../run.toml": {}}}, "has a manifest that lacks a file, or names another"),
        ({"files": 3}, "cannot be read"),
        ({"group_size": 64}, "has shape"),
    ],
)
def test_another_manifest_is_a_sentence(written, tmp_path, change, said):
    directory = copied(written, tmp_path)
    manifest = parse_json((directory / "manifest.json").read_text())
    write_json(directory / "manifest.json", manifest | change)
    with pytest.raises(InvalidInput, match=said):
        load_trained(directory, hush)


def test_tensors_of_another_model_are_named(written, tmp_path):
    directory = copied(written, tmp_path)
    tensors = load_file(directory / FILE)
    name = next(each for each in tensors if each.endswith(".codes"))
    tensors["stray"] = tensors[name].float()
    tensors[name] = tensors[name].to(torch.int8)
    del tensors["norm.weight"]
    save_file(tensors, directory / FILE)
    manifest = parse_json((directory / "manifest.json").read_text())
    manifest["files"][FILE] = {"nbytes": (directory / FILE).stat().st_size, "sha256": sha256(directory / FILE)}
    write_json(directory / "manifest.json", manifest)
    with pytest.raises(InvalidInput) as error:
        load_trained(directory, hush)
    for each in ("'stray': has no place", "norm.weight: is missing", "is stored as torch.int8; torch.uint8 is read"):
        assert each in str(error.value)


def test_training_does_not_start_from_it_and_it_is_not_quantized_again(written, tmp_path, capsys):
    directory = written[8]["directory"]
    with pytest.raises(InvalidInput, match="training starts from those that they were made of"):
        find_weights(Path(directory), hush)
    assert main(["quantize", directory, "--bits", "4", "--to", str(tmp_path / "out")]) == 2
    assert "holds quantized weights already" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bits", "8", "--group-size", "32"], "--group-size = 32: is of 4 bits; of 8 bits a whole row"),
        (["--bits", "3"], "--bits = '3': must be between 4 and 8; nearest that works: 4"),
        (["--bits", "4", "--group-size", "48"], "must be one of 128, 64, 32; nearest that works: 64"),
        (["--bits", "4", "--context", "99"], "nearest that works: 32"),
    ],
)
def test_wrong_arguments_are_sentences(run_dir, tmp_path, capsys, words, said):
    assert main(["quantize", str(run_dir), *words, "--to", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nobodys_files_are_lost(run_dir, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("all of it")
    assert main(["quantize", str(run_dir), "--bits", "8", "--to", str(tmp_path / "out"), "--force"]) == 2
    assert "thesis.txt" in capsys.readouterr().err


WITHOUT_TORCHAO = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchao":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from trainledger.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_torchao(*words):
    command = [sys.executable, "-c", WITHOUT_TORCHAO, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_without_torchao_the_sentence_names_the_extra(run_dir, tmp_path):
    process = without_torchao("quantize", run_dir, "--bits", "8", "--to", tmp_path / "out")
    assert process.returncode == 1
    assert process.stderr.strip() == "trainledger quantize needs torchao: pip install 'trainledger[quantize]'"
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_what_was_written_is_read_without_torchao(written):
    assert without_torchao("sample", written[4]["directory"], "--tokens", "5").returncode == 0


def test_the_run_that_was_the_source_is_kept(run_dir, written):
    kept = load_trained(run_dir.parent.parent / "q8", hush)
    assert kept.run == read(run_dir / "run.toml")
    assert isinstance(kept.tokenizer, ByteTokenizer)
    assert written[8]["weights"].startswith(str(run_dir))
