"""The server over real sockets: who may ask, what is refused and how, and that its description holds."""

import contextlib
import gzip
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

pytest.importorskip("uvicorn")

import uvicorn

from trainledger.report.document import Document
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.web import answers, guard, listening
from trainledger.web.calculator import Calculator, Progress, Reply
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import Field, Query
from trainledger.web.server import Jobs, make_app


@frozen
class Answered:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> dict[str, object]:
        return json.loads(self.body)

    @property
    def sentence(self) -> str:
        return self.data["error"][0]["sentence"]  # type: ignore[index]


@contextlib.contextmanager
def running(app: object, token: str = "") -> Iterator[int]:
    """The port of an application behind its guard, served from a thread."""
    found, address = listening.listen("127.0.0.1", 0)
    server: uvicorn.Server = listening.server(app, listening.Address("127.0.0.1", address.port, address.url, token))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]})
    thread.start()
    try:
        yield address.port
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answered:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return Answered(reply.status, {name.lower(): value for name, value in reply.getheaders()}, body)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(make_app()) as found:
        yield found


@pytest.fixture(scope="module")
def secret() -> Iterator[int]:
    """A server that asks for the token ``open-sesame``."""
    with running(make_app(with_token=True), "open-sesame") as found:
        yield found


WARMED = """
import gc, sys
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.server import encoded, warm_up
before = set(sys.modules)
warm_up(CALCULATORS)
warmed = set(sys.modules)
assert "trainledger.answers.cost" in warmed - before
assert gc.get_freeze_count() > 10_000
for each in CALCULATORS.values():
    if not each.patient:
        for query in ({}, next(iter(each.presets.values()))):
            encoded(answers.view(each.name, query))
print(*sorted(set(sys.modules) - warmed))
"""


def test_after_the_warm_up_no_question_imports_anything() -> None:
    done = subprocess.run([sys.executable, "-c", WARMED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_answer_over_http_is_that_of_python(port: int) -> None:
    query = {"params": "70B", "tokens": "15T", "mfu": "50%"}
    found = ask(port, f"/api/time?{urlencode(query)}")
    assert found.status == 200
    assert found.data == json.loads(json.dumps(answers.answer("time", query)))
    assert ask(port, f"/view/time?{urlencode(query)}&width=700").data == json.loads(
        json.dumps(answers.view("time", query, 700))
    )
    assert ask(port, "/calculators.json").data == json.loads(json.dumps(answers.listing()))


def test_files_are_sent_once_and_answers_zipped(port: int) -> None:
    found = ask(port, "/page.js", Accept_Encoding="gzip")
    assert found.headers["content-encoding"] == "gzip"
    assert found.headers["cache-control"] == "private, no-cache"
    again = ask(port, "/page.js", If_None_Match=found.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    zipped = ask(port, "/view/time", Accept_Encoding="gzip")
    assert json.loads(gzip.decompress(zipped.body)) == ask(port, "/view/time").data
    assert zipped.headers["cache-control"] == "no-store"


def test_a_guess_is_checked_and_an_exercise_given(port: int) -> None:
    assert ask(port, "/exercise/time?seed=3").data == answers.exercise("time", 3)
    assert ask(port, "/check/time?seed=3&guess=1e20&misses=0").data == answers.check("time", 3, "1e20", 0)
    assert ask(port, "/check/time?seed=3&misses=0").sentence == "guess: must be given, in at most 300 characters"
    assert ask(port, f"/check/time?seed=3&misses=0&guess={'9' * 301}").sentence.endswith("in at most 300 characters")
    assert ask(port, f"/view/layouts?run={'a' * 301}").sentence.endswith("must have at most 300 characters")
    assert ask(port, "/view/time?solve=").sentence.startswith("solve = '': must be one of days, count, tokens")
    assert ask(port, "/exercise/time?seed=x").sentence == "seed = 'x': must be a whole number of 0 to 2,147,483,647"
    assert ask(port, "/exercise/time?seed=1&a=2").status == 422


def test_wrong_queries_get_the_sentences_of_the_command_line(port: int) -> None:
    found = ask(port, "/api/time?params=many")
    with pytest.raises(InvalidInput) as raised:
        answers.answer("time", {"params": "many"})
    assert found.status == 422
    assert found.sentence == str(raised.value.problems[0])
    assert ask(port, "/view/time?width=9").status == 422
    assert ask(port, "/view/time?days=1&days=2").sentence == "days: is given more than once"
    assert ask(port, "/view/time?" + "&".join(f"a{at}=1" for at in range(300))).status == 422
    assert ask(port, f"/view/time?days={'9' * 301}").sentence.endswith("at most 300 characters")


def test_a_link_to_a_calculator_has_its_title_and_question_for_who_shows_links(port: int) -> None:
    heads = {}
    for name, calculator in CALCULATORS.items():
        body = ask(port, f"/?calculator={name}&run=gpt2").body.decode()
        titles = re.findall(r'<title>([^<]*)|property="og:title" content="([^"]*)', body)
        assert [unescape(a or b) for a, b in titles] == 2 * [f"{calculator.title} · trainledger"]
        heads[name] = re.findall(r'(?:name="|og:)description" content="([^"]*)', body)
        assert [unescape(each) for each in heads[name]] == 2 * [calculator.question]
    assert len({*map(tuple, heads.values())}) == len(CALCULATORS)
    assert ask(port, "/?calculator=none").body == ask(port, "/").body
    assert b"Will it fit" in ask(port, "/").body


def test_a_link_shows_the_figure_of_its_own_state_and_none_of_an_exercise(port: int) -> None:
    pytest.importorskip("resvg_py")

    def image(path: str) -> str:
        found = re.findall(r'property="og:image" content="([^"]*)', ask(port, path).body.decode())
        assert len(found) == 1
        return unescape(found[0]).removeprefix(f"http://127.0.0.1:{port}")

    state = "/?calculator=time&params=70B&utm_source=a&embed=1&pin=days%3D3&lesson=2"
    assert image(state) == "/figure/time?params=70B"
    assert image("/?calculator=time&exercise=4") == "/figure/time"
    assert image("/") == "/figure/optimal"
    for name in ("time", "memory", "optimal"):  # one quick, one of a run, one that may take seconds
        drawn = ask(port, image(f"/?calculator={name}"))
        assert drawn.headers["content-type"] == "image/png"
        assert drawn.body[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(drawn.body[16:20]) == 1200
    assert ask(port, "/figure/time?params=70B").body != ask(port, "/figure/time").body
    assert ask(port, "/figure/time?params=many").status == 422
    assert "has no figure" in ask(port, "/figure/matmul?device=").sentence


def test_without_a_font_a_link_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    resvg = pytest.importorskip("resvg_py")
    monkeypatch.setattr(resvg, "svg_to_bytes", partial(resvg.svg_to_bytes, skip_system_fonts=True))
    with running(make_app(CALCULATORS)) as port:
        assert b"og:image" not in ask(port, "/?calculator=time").body
        assert "no font" in ask(port, "/figure/time").sentence


def test_what_is_not_there_is_named_with_the_nearest(port: int) -> None:
    assert ask(port, "/api/tim").status == 404
    assert ask(port, "/api/tim").data["error"][0]["nearest"] == "time"  # type: ignore[index]
    assert ask(port, "/nothing.html").sentence == "page = '/nothing.html': is not here"


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/..%2f..%2fserver.py", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page/index.html",
     "/index.html/", "/index.html%00", "/.", "/..", "/%5c..%5cserver.py", "/view/../index.html", "/C:/windows/win.ini"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(port: int, path: str) -> None:
    found = ask(port, path)
    assert found.status == 404
    assert found.data["error"]


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/", "/view/time", "/nothing"])
def test_only_get_is_taken(port: int, method: str, path: str) -> None:
    found = ask(port, path, method)
    assert found.status == 405
    assert found.headers["allow"] == "GET"


@pytest.mark.parametrize("path", ["/", "/view/time", "/view/time?days=x", "/nothing", "/openapi.json"])
def test_every_answer_has_the_headers_that_bind_a_browser(port: int, path: str) -> None:
    headers = ask(port, path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == ("private, no-cache" if path == "/" else "no-store")
    assert not any(name.startswith("access-control") for name in headers)
    assert "server" not in headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "a b", "127.0.0.1.x", "localhost:x", "[::1", "::1",
     "@localhost", "localhost@evil.example", "2130706433"],
)  # fmt: skip
def test_a_name_that_is_not_this_machines_is_refused(port: int, host: str) -> None:
    found = ask(port, "/", Host=host)
    assert found.status == 403
    assert "is not an address of this server" in found.sentence


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "localhost."]
)
def test_names_of_this_machine_are_taken(port: int, host: str) -> None:
    assert ask(port, "/", Host=host).status == 200


def test_another_web_page_may_link_here_and_ask_nothing(port: int) -> None:
    assert ask(port, "/view/time", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    assert ask(port, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200
    assert ask(port, "/view/time", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors").status == 200


def test_a_long_query_is_refused_and_a_pasted_file_is_not(port: int) -> None:
    assert (
        ask(port, f"/view/time?days={'9' * guard.LONGEST_QUERY}").sentence == "query: must have at most 524,288 bytes"
    )
    pasted = ask(port, f"/api/serving?file={quote('# 𝟙' * 6_600)}&config={quote('𝟙' * 20_000)}")
    assert pasted.status == 422
    assert "characters" not in pasted.body.decode()


def test_without_the_token_nothing_is_told(secret: int) -> None:
    for path in ("/", "/index.html", "/calculators.json", "/view/time", "/openapi.json", "/nothing", "/?token=wrong"):
        found = ask(secret, path)
        assert found.status == 401, path
        assert found.headers["www-authenticate"] == "Bearer"
    assert ask(secret, "/view/time?token=open-sesame").status == 401  # only the first link has it
    for cookie in ("", "a", f"trainledger-{secret}=wrong", f"trainledger-{secret}=", ";;=;", "trainledger=open-sesame"):
        assert ask(secret, "/", Cookie=cookie).status == 401, cookie
    for given in ("", "Bearer", "Bearer wrong", "Basic open-sesame", "Bearer \xfc", "open-sesame"):
        assert ask(secret, "/", Authorization=given).status == 401, given
    seen = ask(secret, "/", Accept="text/html,*/*")
    assert (seen.status, seen.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "open the link that trainledger serve printed" in seen.body.decode()
    assert ask(secret, "/", "POST").status == 405
    assert ask(secret, "/?token=open-sesame", Host="evil.example").status == 403


def test_the_first_link_gives_a_cookie_that_is_strict_and_goes_on_without_the_token(secret: int) -> None:
    found = ask(secret, "/?calculator=time&token=open-sesame&days=%22%3E%3Cscript%3E")
    assert found.status == 200
    page = found.body.decode()
    assert "open-sesame" not in page
    assert 'content="0;url=./?calculator=time&amp;days=%22%3E%3Cscript%3E"' in page
    cookie = found.headers["set-cookie"]
    assert cookie == f"trainledger-{secret}=open-sesame; HttpOnly; SameSite=Strict; Path=/"
    assert ask(secret, "/", Cookie=f"other=1; {cookie.partition(';')[0]}").status == 200


def test_a_program_sends_the_token_as_a_bearer(secret: int) -> None:
    found = ask(secret, "/openapi.json", Authorization="Bearer open-sesame")
    assert found.status == 200
    assert found.data["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}  # type: ignore[index]


def test_the_description_names_every_calculator_with_its_fields(port: int) -> None:
    described = ask(port, "/openapi.json").data
    for name, calculator in CALCULATORS.items():
        for way in ("api", "view", "figure", "check", "exercise"):
            operation = described["paths"][f"/{way}/{name}"]["get"]  # type: ignore[index]
            assert operation["responses"].keys() >= {"200", "422"}
        parameters = {each["name"]: each for each in described["paths"][f"/api/{name}"]["get"]["parameters"]}  # type: ignore[index]
        for field in calculator.fields:
            schema = parameters[field.name]["schema"]
            assert schema["maxLength"] == field.longest
            assert field.title in parameters[field.name]["description"]
            assert schema.get("enum", []) == list(field.allowed)
            assert bool(field.allowed) == (field.strict and "." not in field.name)


def test_what_is_described_as_required_is_there(port: int) -> None:
    described = ask(port, "/openapi.json").data
    for way in ("api", "view", "check"):
        operation = described["paths"][f"/{way}/time"]["get"]  # type: ignore[index]
        reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        schema = described["components"]["schemas"][reference.rpartition("/")[2]]  # type: ignore[index]
        more = "?seed=1&guess=3&misses=0" if way == "check" else ""
        assert set(schema["required"]) <= set(ask(port, f"/{way}/time{more}").data)
    listed = described["components"]["schemas"]["Listed"]["properties"]  # type: ignore[index]
    kinds = {"string": str, "array": list, "object": dict}
    for one in ask(port, "/calculators.json").data:
        assert all(isinstance(one[name], kinds[field["type"]]) for name, field in listed.items())


def calculator(reply: object, *, patient: bool = False) -> Calculator:
    fields = (Field(name="n", title="n", default="1"),)
    return Calculator(name="x", title="x", question="x", fields=fields, reply=reply, presets={}, patient=patient)  # type: ignore[arg-type]


def done(query: Query) -> Reply:
    return Reply(document=Document("x", (), data=lambda: {"n": query["n"]}), values={}, verdict=f"n is {query['n']}")


def test_an_error_of_ours_is_a_sentence_for_who_asked_and_a_traceback_in_the_terminal(capfd: object) -> None:
    def broken(query: Query, progress: Progress) -> Reply:
        raise ZeroDivisionError("a secret")

    for patient in (False, True):
        with running(make_app({"x": calculator(broken, patient=patient)})) as port:
            found = ask(port, "/view/x")
        assert found.status == 500
        assert b"secret" not in found.body
        assert "met an error of trainledger" in found.sentence
        assert "ZeroDivisionError: a secret" in capfd.readouterr().err  # type: ignore[attr-defined]


def test_long_work_is_answered_with_how_far_it_is_then_with_the_answer() -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(query: Query, progress: Progress) -> Reply:
        progress("layouts", 3, 7)
        began.set()
        go_on.wait(60)
        if query["n"] == "0":
            raise InvalidInput([Problem("n", 0, "is too few")])
        return done(query)

    app = make_app({"x": calculator(slow, patient=True)})
    app.state.jobs.wait_seconds = 0.05
    with running(app) as port:
        first = ask(port, "/view/x?n=2")
        assert first.status == 202
        assert began.wait(60)
        assert ask(port, "/view/x?n=2").data == {"working": {"what": "layouts", "done": 3, "of": 7}}
        assert ask(port, "/exercise/x?seed=1").status == 422  # a quick question does not wait for it
        go_on.set()
        until(lambda: ask(port, "/view/x?n=2").status == 200)
        assert ask(port, "/view/x?n=2").data["verdict"] == "n is 2"
        until(lambda: ask(port, "/view/x?n=0").status == 422)
        assert ask(port, "/view/x?n=0").sentence == "n = 0: is too few"


def test_a_long_answer_is_that_of_its_own_width(port: int) -> None:
    query = "budget=flops&flops=1e22"
    wide, narrow = (ask(port, f"/view/optimal?{query}&width={each}").body for each in (960, 380))
    assert b'viewBox=\\"0 0 960' in wide
    assert b'viewBox=\\"0 0 380' in narrow


def test_a_search_is_made_once_for_every_width_and_way_to_ask() -> None:
    searches = []

    def search(query: Query, progress: Progress) -> Reply:
        searches.append(query["n"])
        time.sleep(0.02)
        return done(query)

    app = make_app({"x": calculator(search, patient=True)})
    app.state.jobs.wait_seconds = 0.0  # each answer is first one that is worked on
    with running(app) as port:
        for path in ("/view/x?n=3", "/view/x?n=3&width=380", "/api/x?n=3", "/view/x?n=4"):
            until(lambda path=path: ask(port, path).status == 200)  # type: ignore[misc]
    assert searches == ["3", "4"]


def test_work_that_nobody_asks_for_any_more_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainledger.web.server.FORGOTTEN_SECONDS", 0.05)
    ended = threading.Event()

    def endless(query: Query, progress: Progress) -> Reply:
        try:
            while True:
                progress("layouts", 0, 1)
                time.sleep(0.005)
        except KeyboardInterrupt:
            ended.set()
            return done(query)  # as a search that Ctrl-C ends gives what it has

    app = make_app({"x": calculator(endless, patient=True)})
    app.state.jobs.wait_seconds = 0.01
    with running(app) as port:
        assert ask(port, "/view/x").status == 202
        assert ended.wait(60)
        assert ask(port, "/view/x").status == 202  # what a cancelled search gave is no answer


def test_work_whose_asker_has_gone_is_cancelled_at_once_and_so_is_what_waits_behind_it() -> None:
    ended, began = threading.Semaphore(0), threading.Semaphore(0)

    def endless(query: Query, progress: Progress) -> Reply:
        began.release()
        try:
            while True:
                progress("layouts", 0, 1)
                time.sleep(0.005)
        except KeyboardInterrupt:
            ended.release()
            raise

    app = make_app({"x": calculator(endless, patient=True)})
    app.state.jobs.wait_seconds = 60
    with running(app) as port:
        open_ones = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(4)]
        for at, each in enumerate(open_ones):
            each.request("GET", f"/view/x?n={at}")
        assert began.acquire(timeout=60)
        assert began.acquire(timeout=60)
        for each in open_ones:
            each.close()
        assert ended.acquire(timeout=60)
        assert ended.acquire(timeout=60)
        until(lambda: all(each.future.done() for each in app.state.jobs._jobs.values()))


def test_more_questions_than_threads_wait_with_a_sentence() -> None:
    go_on = threading.Event()

    def slow(query: Query, progress: Progress) -> Reply:
        progress("layouts", 1, 2)
        go_on.wait(60)
        return done(query)

    app = make_app({"x": calculator(slow, patient=True)})
    app.state.jobs.wait_seconds = 0.05
    with running(app) as port:
        said = [ask(port, f"/view/x?n={n}").data["working"]["what"] for n in range(40)]  # type: ignore[index]
        assert said.count("layouts") <= 2
        assert "waits until another answer is there" in said
        assert said[-1] == "waits until other answers are there"
        go_on.set()
        until(lambda: ask(port, "/view/x?n=0").status == 200)


def test_answers_that_are_there_are_bounded_in_number() -> None:
    import asyncio

    async def here() -> bool:
        return False

    async def many() -> int:
        jobs = Jobs()
        for key in range(100):
            assert await jobs.ask(key, lambda progress: b"x", here) == b"x"
        jobs.close()
        return len(jobs._jobs)

    assert asyncio.run(many()) <= 32


def test_a_port_in_use_is_refused_with_the_next_free_one() -> None:
    found, address = listening.listen("127.0.0.1", 0)
    with found, pytest.raises(InvalidInput) as raised:
        listening.listen("127.0.0.1", address.port)
    (problem,) = raised.value.problems
    assert str(problem).startswith(f"--port = {address.port}: cannot be had: Address already in use")
    assert isinstance(problem.nearest, int)
    assert problem.nearest > address.port


def test_loopback_needs_no_token_and_every_other_address_does() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        found, address = listening.listen(host, 0)
        found.close()
        assert not address.token
    found, address = listening.listen("0.0.0.0", 0)
    found.close()
    assert len(address.token) == 32
    assert address.url.endswith(f":{address.port}/?token={address.token}")
    with pytest.raises(InvalidInput, match="is no address of this machine"):
        listening.listen("192.0.2.1", 0)
    with pytest.raises(InvalidInput, match="is no address of this machine"):
        listening.listen("a..b", 0)


def test_files_of_the_page_are_read_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"read again")
    assert ask(port, "/index.html").body.startswith(b"<!doctype html>")


def until(true: object) -> None:
    """Wait until it is true; the time limit of the test ends it otherwise."""
    while not true():  # type: ignore[operator]
        time.sleep(0.02)
