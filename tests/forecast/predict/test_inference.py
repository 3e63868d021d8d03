"""A served model: published sizes, bounds by hand, and what must grow or fall with what."""

import doctest
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainledger as tl
from models import sizes
from trainledger import catalog
from trainledger.cli import main
from trainledger.forecast.plan import serving as module
from trainledger.ledger import serving as serve
from trainledger.ledger.model import attention as cache_rules
from trainledger.ledger.model.attention import kv_cache
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.serving import account_serving, experts_met
from trainledger.spec.device import Device
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.serving import WEIGHT_FORMATS, Serving
from trainledger.spec.units import GIB, KIB

H100 = {"device": "h100-sxm"}


def run_of(name: str, device: str = "h100-sxm", tensor: int = 1, **model: object) -> tl.Run:
    recipe = {"seq_len": 1024, "global_batch": 1, "steps": 1}
    fields = {"preset": name, "n_mtp_layers": 0, **model}
    cluster = {"device": device, "count": tensor}
    return tl.load({"model": fields, "recipe": recipe, "layout": {"tensor": tensor}, "cluster": cluster})


# Bytes of one token in 16 bits, and who says so.
PUBLISHED = {
    "llama-2-7b": (512 * KIB, "2 x 32 layers x 32 heads x 128 x 2 bytes, as Kwon et al. 2023 count OPT-13B"),
    "llama-3-70b": (320 * KIB, "2 x 80 layers x 8 key-value heads x 128 x 2 bytes"),
    "llama-3-8b": (128 * KIB, "news.future-shock.ai/the-weight-of-remembering, read 2026-11-20"),
    "gpt2-xl": (300 * KIB, "the same"),
    "opt-13b": (800 * KIB, "Kwon et al. 2023, PagedAttention (arXiv 2309.06180), section 3: 800 KB"),
    "deepseek-v3": (70_272, "DeepSeek-AI 2025 (arXiv 2505.09343), table 1: 70.272 KB; not read here"),
    "llama-3.1-405b": (516_096, "the same: 516.096 KB"),
    "qwen2.5-72b": (327_680, "the same: 327.680 KB"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_bytes_of_one_token(name):
    cache = kv_cache(tl.model(name), "bf16")
    assert cache.token_nbytes() == cache.nbytes(1, 1) == PUBLISHED[name][0]


def test_deepseek_v2_keeps_a_latent_and_one_key():
    # DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), table 1: (d_c + d_R) l = 4.5 d_h l elements of a token.
    spec = tl.model("deepseek-v2-lite")
    assert kv_cache(spec, "bf16").token_nbytes() == 2 * int(4.5 * 128) * spec.n_layers


def test_layers_with_a_window_stop_growing():
    spec = tl.model("gemma-3-12b")
    cache = kv_cache(spec, "bf16")
    local, whole = (sum(each.layers for each in cache.kinds if (each.window is None) is wanted)
                    for wanted in (False, True))  # fmt: skip
    assert (local + whole, spec.attention.window, whole) == (spec.n_layers, 1024, spec.n_layers // 6)
    one = 2 * spec.kv_heads * spec.head_size * 2
    assert cache.nbytes(1, 32_768) == one * (local * 1024 + whole * 32_768)
    assert cache.nbytes(2, 100) == 2 * 100 * cache.token_nbytes()


@pytest.mark.parametrize(
    ("name", "weights", "quantized", "published", "within"),
    [
        # OpenAI 2025, gpt-oss model card (arXiv 2508.10925), table 1: checkpoints of 12.8 and 60.8 GiB.
        ("gpt-oss-20b", "mxfp4", "experts", 12.8 * GIB, 0.005),
        ("gpt-oss-120b", "mxfp4", "experts", 60.8 * GIB, 0.005),
        # TheBloke/Llama-2-7B-GPTQ and -AWQ, 4 bits in groups of 128: files of 3.90 and 3.89 GB (not read here).
        ("llama-2-7b", "int4", "linear", 3.89e9, 0.005),
    ],
)
def test_published_sizes_of_quantized_models(name, weights, quantized, published, within):
    answer = Serving(weights=weights, quantized=quantized)
    nbytes = dict(account_serving(run_of(name), answer, backend="cuda").resident)["frozen weights"]
    assert abs(nbytes / published - 1) < within


def test_decode_of_one_sequence_reads_weights_and_cache_once():
    run, device = run_of("llama-3-8b"), catalog.device("h100-sxm")
    answer = tl.inference(run, batch=1, context=8192)
    spec = run.model
    head_and_blocks = 2 * (parameters(spec).total - spec.vocab_size * spec.d_model)
    assert answer.moved_nbytes["weights"] == head_and_blocks + 2 * spec.d_model
    assert answer.moved_nbytes["cache"] == 8192 * 128 * KIB
    by_hand = (answer.moved_nbytes["weights"] + answer.moved_nbytes["cache"]) / device.memory_bytes_per_second
    assert answer.time.limit == "memory"
    assert answer.time.bound_seconds == pytest.approx(by_hand, rel=2e-3)
    assert answer.time.expected_seconds > answer.time.bound_seconds
    assert answer.expected_tokens_per_second * answer.time.expected_seconds == pytest.approx(1)
    # Pope et al. 2022, section 2: 2 N of a token, and attention 4 L d T more.
    two_n = 2 * (parameters(spec).total - spec.vocab_size * spec.d_model)
    norms = 2 * parameters(spec).by_component["norms"]
    assert answer.ledger.matmul_flops == two_n - norms + 4 * spec.n_layers * spec.d_model * 8192


def test_a_long_prompt_is_bound_by_compute_and_costs_as_training_forward():
    from trainledger.ledger.step import account

    run = run_of("llama-3-8b")
    answer = tl.inference(run, phase="prefill", context=8192)
    assert answer.time.limit == "compute"
    training = account(replace(run, recipe=with_fields(run.recipe, {"seq_len": 8192, "precision": "bf16",
    "attention": "flash"})),
                       backend="cuda")  # fmt: skip
    forward = training.filter(lambda each: each.phase == "forward").matmul_flops
    logits = 2 * run.model.d_model * run.model.vocab_size
    assert answer.ledger.matmul_flops == forward - 8191 * logits  # logits of the last token only
    assert answer.bound_tokens_per_second == pytest.approx(8192 / answer.time.bound_seconds)


SMALL = sizes(V=64, D=64, L=2, H=4, F=96, T=4096)


@pytest.mark.parametrize(("weights", "compute", "wide"), [("fp32", "bf16", 4), ("bf16", "fp32", 2)])
def test_weights_that_are_wider_than_the_matmuls_are_read_as_they_are_stored(weights, compute, wide):
    run = tl.load({"model": SMALL, "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1}, "cluster": H100})
    answer = tl.inference(run, phase="decode", context=8, weights=weights, compute=compute)
    matmuls = [each for each in answer.ledger if each.kind == "matmul" and each.path.endswith("up_proj")]
    assert sum(each.read for each in matmuls) == pytest.approx(wide * 64 * 96, rel=0.05)
    assert 0 <= answer.moved_nbytes["activations"] < answer.moved_nbytes["weights"]


@settings(max_examples=25)
@given(
    batch=st.integers(1, 64), context=st.integers(1, 4000), kv=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 7, 512]), phase=st.sampled_from(["prefill", "decode"]),
    weights=st.sampled_from(sorted(WEIGHT_FORMATS)), cache=st.sampled_from(["bf16", "fp8", "int4"]),
)  # fmt: skip
def test_what_must_grow_grows(batch, context, kv, window, phase, weights, cache):
    run = tl.load({"model": {**SMALL, "attention.n_kv_heads": kv, "attention.window": window or "none"},
                   "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1}, "cluster": H100})  # fmt: skip
    one = Serving(phase=phase, batch=batch, context=context, weights=weights, cache=cache)
    machine = tl.machine_of(run)

    def answer(serving):
        return module.inference(run, serving, machine, backend="cuda", table=False)

    here, more, longer = answer(one), answer(replace(one, batch=batch + 1)), answer(replace(one, context=context + 1))
    assert sum(here.moved_nbytes.values()) == here.ledger.total("read") + here.ledger.total("written")
    assert min(here.moved_nbytes.values()) >= 0
    for other in (more, longer):
        assert other.cache_nbytes >= here.cache_nbytes
        assert other.ledger.flops >= here.ledger.flops
        assert other.time.bound_seconds >= here.time.bound_seconds
        assert other.memory.nbytes >= here.memory.nbytes
        assert other.weights == here.weights
    wider = replace(machine, memory_bytes_per_second=2 * machine.memory_bytes_per_second)
    assert module.inference(run, one, wider, backend="cuda", table=False).time.bound_seconds <= here.time.bound_seconds


DECODED = {
    (name, tensor): run_of(name, tensor=tensor)
    for name, tensor in (("llama-3-70b", 1), ("llama-3-70b", 8), ("gpt2", 1), ("mixtral-8x7b", 1), ("gpt-oss-20b", 1))
}


@settings(max_examples=60)
@given(
    served=st.sampled_from(sorted(DECODED)), batch=st.integers(1, 300), more=st.sampled_from([1, 1, 7, 16, 100]),
    weights=st.sampled_from(sorted(WEIGHT_FORMATS)), context=st.sampled_from([1, 1000]),
)  # fmt: skip
def test_one_more_sequence_never_makes_a_step_quicker(served, batch, more, weights, context):
    """A kernel fills up its last tile: 16 sequences are no other kernel than 15 or 17."""
    run = DECODED[served]
    machine = tl.machine_of(run)
    few, many = (
        module.inference(run, Serving(batch=each, context=context, weights=weights), machine, backend="cuda",
                         table=False).time.expected_seconds
        for each in (batch, batch + more)
    )  # fmt: skip
    assert few <= many * (1 + 1e-12)


@pytest.mark.parametrize("batch", [1, 32])
def test_what_tensor_ranks_send_is_in_the_bound_by_its_bytes(batch: int) -> None:
    # Two sums a layer and one of the embedding, each of a row of d_model for every sequence; the logits are gathered.
    run = run_of("llama-3-70b", "a100-sxm-80gb", tensor=8)
    answer = tl.inference(run, batch=batch, context=1024)
    spec, link = run.model, catalog.device("a100-sxm-80gb").link_bytes_per_second
    assert answer.collectives == {"all_reduce": 2 * spec.n_layers + 1, "all_gather": 1}
    sent = 7 / 8 * 2 * batch * (2 * (2 * spec.n_layers + 1) * spec.d_model + spec.vocab_size)
    assert answer.time is not None
    assert answer.time.bound_seconds_by_limit["links"] == pytest.approx(sent / link)
    assert sum(answer.time.bound_seconds_by_limit.values()) == pytest.approx(answer.time.bound_seconds)
    # As they run, they also have to begin.
    assert answer.time.expected_link_seconds > answer.time.bound_seconds_by_limit["links"]
    moved = answer.time.expected_seconds - answer.time.expected_link_seconds
    assert moved > answer.time.bound_seconds_by_limit["memory"]


def test_slower_links_and_larger_batches_never_make_collectives_quicker() -> None:
    def links(batch: int, device: Device) -> tuple[float, float]:
        run = run_of("llama-3-8b", "a100-sxm-80gb", tensor=8)
        answer = module.inference(run, Serving(batch=batch), device, backend="cuda", table=False)
        assert answer.time is not None
        assert answer.time.expected_link_seconds is not None
        return answer.time.bound_seconds_by_limit["links"], answer.time.expected_link_seconds

    device = catalog.placed(catalog.device("a100-sxm-80gb"), run_of("llama-3-8b").cluster)
    node = device.fabric.node
    slow = replace(
        device, fabric=replace(device.fabric, node=replace(node, bytes_per_second=node.bytes_per_second / 2))
    )
    some = [links(batch, device) for batch in (1, 4, 64, 1024)]
    assert some == sorted(some)
    assert sorted(each for _, each in some) == [each for _, each in some]
    for batch, quick in zip((1, 4, 64, 1024), some, strict=True):
        assert all(after > before for before, after in zip(quick, links(batch, slow), strict=True))


def test_collectives_are_named_with_their_part_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--phase", "decode", "--batch", "4", "--device", "a100-sxm-80gb"]
    assert main([*words, "--count", "8", "--set", "layout.tensor=8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "all other operations fused into them, and 65 all-reduces and 1 all-gather between tensor ranks: " in said
    assert said.count("65 all-reduces and 1 all-gather between tensor ranks") == 2
    assert main([*words, "--count", "8", "--set", "layout.tensor=8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["collectives"] == {"all_reduce": 65, "all_gather": 1}
    assert 0 < answer["time"]["bound_seconds_by_limit"]["links"] < answer["time"]["expected_link_seconds"]
    assert main(words) == 0
    assert "between tensor ranks" not in capsys.readouterr().out


def test_tensor_ranks_divide_weights_and_cache():
    whole, rank = (tl.inference(run_of("llama-3-70b", tensor=each), batch=4, context=4096) for each in (1, 8))
    assert rank.cache_nbytes == whole.cache_nbytes // 8
    assert whole.weights.nbytes / 8 <= rank.weights.nbytes <= 1.01 * whole.weights.nbytes / 8
    assert whole.largest_batch == 0
    assert rank.largest_batch > 100
    assert not whole.memory.fits
    assert rank.memory.fits
    sums = rank.ledger.filter(lambda each: each.name == "all_reduce")
    assert sum(each.times for each in sums) == 2 * 80 + 1  # two in each block, one of the embedding
    assert {each.payload for each in sums} == {4 * 8192 * 2}
    # The latent of latent attention is held by every rank.
    latent = tl.inference(run_of("deepseek-v3", tensor=8, device="h200"), weights="fp8-block", context=64)
    assert latent.token_nbytes == latent.whole_token_nbytes == 70_272


def test_the_largest_batch_fits_and_one_more_does_not():
    answer = tl.inference(run_of("llama-3-8b"), batch=8, context=8192)
    rows = {each.batch: each for each in answer.batches}
    assert rows[answer.largest_batch].fits
    assert rows[answer.largest_batch + 1].fits is False
    assert rows[8].time == answer.time
    assert (answer.fits, "NOT fit" in repr(answer)) == (True, False)
    larger = tl.inference(run_of("llama-3-8b"), batch=answer.largest_batch + 1, context=8192)
    assert (larger.fits, repr(larger).endswith(" s, does NOT fit)")) == (False, True)
    quantized = tl.inference(run_of("llama-3-8b"), batch=8, context=8192, weights="int4", cache="fp8")
    assert quantized.largest_batch > 2 * answer.largest_batch
    assert quantized.time.bound_seconds < answer.time.bound_seconds


def test_experts_are_read_when_a_token_is_sent_to_them():
    run = run_of("mixtral-8x7b")
    spec = run.model
    assert experts_met(spec, 1) == spec.experts.per_token / spec.experts.n_experts
    one, many = (tl.inference(run, batch=each, context=128).moved_nbytes["weights"] for each in (1, 4096))
    experts = 2 * parameters(spec).by_component["experts"]
    embedded = 2 * spec.d_model
    assert many - one == pytest.approx(experts * (1 - 0.25) + 4095 * embedded, rel=1e-6)
    # Every way to send two tokens, counted one by one.
    share = experts_met(
        with_fields(spec, {"feed_forward": "experts", "feed_forward.n_experts": 3, "feed_forward.per_token": 1}), 2
    )
    assert share == pytest.approx(sum(len({a, b}) for a in range(3) for b in range(3)) / 9 / 3)


def test_no_bandwidth_no_time():
    run = run_of("gpt2", device="h100-sxm")
    machine = replace(catalog.device("h100-sxm"), memory_bytes_per_second=None)
    answer = module.inference(run, Serving(context=64), machine, backend="cuda", table=False)
    assert answer.time is None
    assert any("no memory bandwidth on record" in each for each in answer.notes)
    answer = module.inference(run, Serving(context=64), None, backend="cpu")
    assert (answer.time, answer.memory, answer.largest_batch) == (None, None, None)


def test_wrong_servings_are_sentences():
    run = run_of("gpt2")
    for serving, sentence in (
        ({"phase": "train"}, "phase = 'train': must be one of prefill, decode"),
        ({"weights": "int3"}, "weights = 'int3': must be one of"),
        ({"context": 5000}, "context = 5000: is longer than model.max_seq_len = 1024; nearest that works: 1024"),
        ({"batch": 0}, "batch = 0: must be between 1 and"),
    ):
        with pytest.raises(InvalidInput) as caught:
            tl.inference(run, **serving)
        assert sentence in str(caught.value)


def test_examples():
    for each in (serve, cache_rules):
        failed, tried = doctest.testmod(each)
        assert (failed, tried > 0) == (0, True)


# The command line


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


DECODE = ("plan", "--phase", "decode", "llama-3-8b", "--set", "cluster.device=h100-sxm")


@pytest.mark.parametrize("more", [
    (), ("--batch", "64", "--weights", "nf4-double", "--cache", "int8"),
    ("--set", "layout.tensor=8", "--set", "cluster.count=8", "--batch", "1k"),
])  # fmt: skip
def test_it_fits_80_columns_and_json_says_the_same(capsys, more):
    code, out, err = call(capsys, *DECODE, *more, "--full")
    too_large = "1k" in more  # 594 sequences fit: what cannot run is answered, and exits with 2
    assert code == (2 if too_large else 0)
    assert ("nearest that works: 594" in err) == too_large == bool(err)
    assert max(len(line) for line in out.splitlines()) <= 80
    answer = json.loads(call(capsys, *DECODE, *more, "--json")[1])
    assert f"{answer['weights']['nbytes']:,}" in out
    assert f"{answer['cache_nbytes']:,}" in out
    assert f"The largest batch that fits is {answer['largest_batch']:,}." in out
    bound, expected = answer["bound_tokens_per_second"], answer["expected_tokens_per_second"]
    assert bound * answer["time"]["bound_seconds"] == pytest.approx(expected * answer["time"]["expected_seconds"])
    assert expected < bound
    (row,) = [each for each in answer["batches"] if each["batch"] == answer["serving"]["batch"]]
    assert [row["bound_tokens_per_second"], row["expected_tokens_per_second"]] == [bound, expected]
    assert not any(name == "tokens_per_second" for name in (*answer, *row))
    assert answer["weights"]["nbytes"] == sum(
        answer["weights"][f"{each}_nbytes"] for each in ("codes", "scales", "whole")
    )


def test_prefill_of_a_windowed_model(capsys):
    code, out, _ = call(capsys, "plan", "--phase", "prefill", "gemma-2-2b", "--set", "cluster.device=a100-sxm-80gb")
    assert code == 0
    assert "layers with a window keep at most 4,096 tokens" in " ".join(out.split())
    assert "compute-bound" in out


def test_flags_without_a_phase_and_a_figure_of_no_kind_are_refused(capsys):
    code, out, err = call(capsys, "plan", "gpt2", "--weights", "int4")
    assert (code, out) == (2, "")
    assert err == "--weights = 'int4': is for a served model; give --phase too; nearest that works: --phase decode\n"
    code, out, err = call(capsys, *DECODE, "--plot", "x.pdf")
    assert (code, out) == (2, "")
    assert err.endswith("must be one of .html, .png, .svg; nearest that works: x.html\n")
    code, _, err = call(capsys, *DECODE, "--batch", "1.5")
    assert code == 2
    assert err.startswith("--batch = '1.5': is not a whole number of things")


def test_a_model_with_prediction_modules_on_several_devices(capsys):
    words = ["plan", "--phase", "decode", "deepseek-v3", "--set", "layout.tensor=8", "--set", "cluster.count=8"]
    code, out, _ = call(capsys, *words, "--set", "cluster.device=h200", "--weights", "fp8-block", "--context", "4k")
    assert code == 0
    assert "One token takes 70,272 bytes (68.62 KiB)" in out


def test_a_measured_machine_gives_no_bound():
    from trainledger.spec.calibration import Calibration, KernelTime

    kernels = tuple(
        KernelTime(kind=kind, dtype="fp32", shape=(1, 1, 1), flops=flops, nbytes=nbytes, seconds=1e-3)
        for kind, flops, nbytes in (("matmul", 10**9, 10**7), ("attention", 10**9, 10**7), ("copy", 0, 10**7))
    )
    machine = Calibration(
        title="a machine", date="2026-11-20", backend="cpu", torch_version="2.13", threads=1, memory_nbytes=10**9,
        operation_seconds=1e-6, kernels=kernels,
    )  # fmt: skip
    run = tl.load({"model": SMALL, "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1}})
    serving = Serving(context=64, weights="fp32", cache="fp32", compute="fp32")
    answer = module.inference(run, serving, machine, backend="cpu")
    assert answer.time.basis == "assumed"
    assert answer.time.expected_seconds >= answer.time.bound_seconds > 0
    assert answer.largest_batch > 1

    assert "On a machine about" in str(answer)
    assert "at the measured rates" in " ".join(str(answer).split())


def test_the_largest_batch_is_found_with_few_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(run: object, serving: Serving, *, backend: str) -> object:
        asked.append(serving.batch)
        return account_serving(run, serving, backend=backend)

    monkeypatch.setattr("trainledger.forecast.plan.serving.account_serving", counted)
    for context in ("512", "8192"):
        asked.clear()
        found = tl.inference("llama-3-8b", ["cluster.device=h100-sxm"], context=context, batch=16)
        rows = {row.batch: row.fits for row in found.batches}
        assert (rows[found.largest_batch], rows[found.largest_batch + 1]) == (True, False)
        assert len(asked) == len(set(asked)) <= len(rows) + 2
