"""The page in a real browser: Debian's chromium, by Playwright."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.watch_runs import make_large, make_run, make_search
from raynforce.engines.native import timing
from raynforce.experiment import resolve
from raynforce.runs import lock
from raynforce.runs.advising import advice
from raynforce.runs.faults import ENV_RESTARTED, FaultGroup
from raynforce.web.server import Server

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parent / "axe" / "axe.min.js"
SIZE = {"width": 1300, "height": 850}
EVIL = "<img src=x onerror=document.title='owned'>"

KINDS = ("central", "replay", "shared-agent", "rllib")
GIF = bytes.fromhex("47494638396101000100800000ffffff00000021f90401000000002c00000000010001000002024401003b")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paged") / "runs"
    for seed in range(3):
        make_run(folder / "cart" / f"seed{seed}", seed=seed)
    make_run(folder / EVIL.replace("/", ""), env=EVIL, lines=5)
    make_search(folder / "search", trials=8)
    for kind in KINDS:
        _of_kind(make_run(folder / kind, lines=1 if kind == "shared-agent" else 5), kind)  # one has reported once
    (folder / "cart" / "seed0" / "episodes").mkdir()
    for step in (1000, 2000):
        (folder / "cart" / "seed0" / "episodes" / f"step_{step:012d}-1.gif").write_bytes(GIF)
    return folder


def _of_kind(run: Path, kind: str) -> None:
    """Another topology, and what only that reports."""
    config = (run / "config.yaml").read_text()
    topology = "sync" if kind == "rllib" else kind
    (run / "config.yaml").write_text(config.replace("topology: overlap", f"topology: {topology}"))
    more: dict[str, float] = {}
    if kind == "central":
        more = {"inference/batch": 3.5, "time/env/busy": 0.2, "time/env/wire": 0.8}
    elif kind == "replay":
        more = {"replay/size": 123_456.0, "replay/fill": 0.12, "replay/samples_per_insert": 15.25}
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if kind == "rllib":
        config = (run / "config.yaml").read_text().replace("engine: native", "engine: rllib")
        (run / "config.yaml").write_text(config)
        told = [{name: value for name, value in line.items() if not name.startswith("time/")} for line in told]
        more = {"time/sample": 1.5, "time/learn": 0.5}
        (run / "live.json").unlink()
        went = "where the time went: start-up 60%, sampling 30%, learning 10%"
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": "result", "where_the_time_went": went}) + "\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line | more) + "\n" for line in told))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server([folder], port=0) as server:
        deadline = time.monotonic() + 60
        while len(server.board.to_json()["runs"]) < 12 and time.monotonic() < deadline:
            server.board.touch()
            time.sleep(0.05)
        yield server


class Tab:
    """A tab of a browser with its errors."""

    def __init__(self, browser: Any, server: Server, **how: Any) -> None:
        self.errors: list[str] = []
        self.context = browser.new_context(viewport=how.pop("viewport", SIZE), **how)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if "Content Security" in said.text else None)
        self.show(server)

    def show(self, server: Server) -> None:
        self.server, self.base = server, server.url.partition("#")[0]
        self.page.goto(server.url)
        self.page.wait_for_selector("h1")

    def go(self, where: str, wait: str = "h1") -> None:
        self.page.evaluate("where => { location.hash = where }", where)
        self.page.wait_for_selector(wait)

    def id(self, name: str) -> str:
        return next(run["id"] for run in self.server.board.to_json()["runs"] if run["name"] == name)

    def until(self, what: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, self.page.inner_text("body")[:2000]
            self.page.wait_for_timeout(30)
        return found


@pytest.fixture(scope="module")
def one_tab(browser: Any, server: Server) -> Iterator[Tab]:
    tab = Tab(browser, server)
    yield tab
    tab.context.close()


@pytest.fixture
def tab(one_tab: Tab, server: Server) -> Iterator[Tab]:
    """The one tab of these tests, as new."""
    one_tab.errors.clear()
    one_tab.page.set_viewport_size(SIZE)
    one_tab.page.goto("about:blank")
    one_tab.show(server)
    yield one_tab
    one_tab.page.evaluate("localStorage.clear()")
    assert one_tab.errors == []


OVERLAPS = """
() => {
  const boxes = [...document.querySelectorAll(".node > rect:first-child")].map((each) => each.getBoundingClientRect());
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return [...document.querySelectorAll(".edge-label")]
    .filter((each) => boxes.some((box) => over(each.getBoundingClientRect(), box))).map((each) => each.textContent);
}
"""


def points(tab: Tab, chart: str = "charts/episodic_return") -> str:
    return str(tab.page.inner_text(f'[data-key="{chart}"] .chart-head span'))


def drag(tab: Tab, chart: str, start: float, end: float, shift: bool = False) -> None:
    box = tab.page.locator(f'[data-key="{chart}"] .u-over').bounding_box()
    y = box["y"] + box["height"] / 2
    if shift:
        tab.page.keyboard.down("Shift")
    tab.page.mouse.move(box["x"] + box["width"] * start, y)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] * (start + end) / 2, y, steps=3)
    tab.page.mouse.move(box["x"] + box["width"] * end, y, steps=3)
    tab.page.mouse.up()
    if shift:
        tab.page.keyboard.up("Shift")


def test_runs_are_filtered_grouped_and_compared(tab: Tab) -> None:
    page = tab.page
    page.wait_for_selector("tr[data-id]")
    assert page.locator("tr[data-id]").count() == 12
    page.fill("input[type=search]", "cart seed")
    tab.until(lambda: page.locator("tr[data-id]").count() == 3)
    page.select_option("select", "folder")
    tab.until(lambda: page.locator("tr.group").count() == 1)
    page.locator("tr.group input").check()
    page.get_by_role("button", name="Compare 3").click()
    page.wait_for_selector('[data-key="charts/episodic_return"] canvas')
    tab.until(lambda: points(tab) == "300 points")
    assert page.locator(".pickrun input:checked").count() == 3
    page.locator('[data-key="charts/episodic_return"] .u-over').hover()
    tab.until(lambda: page.locator(".tip-row").count() == 3)
    assert "step" in page.inner_text(".tip")
    page.get_by_role("button", name="Seeds together").click()
    tab.until(lambda: "cart (3)" in _hover(tab))


def _hover(tab: Tab) -> str:
    over = tab.page.locator('[data-key="charts/episodic_return"] .u-over')
    over.hover(position={"x": 50 + time.monotonic() % 9, "y": 40})
    return str(tab.page.inner_text(".tip"))


def test_zoom_pan_and_a_link_that_restores_what_is_seen(tab: Tab, browser: Any) -> None:
    page = tab.page
    tab.go(f"#/curves?runs={tab.id('cart/seed0')},{tab.id('cart/seed1')}&x=time&smooth=0.1", ".u-over")
    tab.until(lambda: points(tab) == "200 points")
    drag(tab, "charts/episodic_return", 0.4, 0.6)
    tab.until(lambda: "from=" in page.url)
    zoomed = page.url
    drag(tab, "charts/episodic_return", 0.5, 0.3, shift=True)
    tab.until(lambda: page.url != zoomed)
    before = page.url
    page.close()
    page = tab.page = tab.context.new_page()
    page.goto(before)
    page.wait_for_selector(".u-over")
    tab.until(lambda: "points" in points(tab))
    assert page.url == before
    assert page.input_value("input[type=range]") == "0.1"
    assert page.locator(".pickrun input:checked").count() == 2
    page.keyboard.press("0")
    tab.until(lambda: "from=" not in page.url)


def test_one_run_with_all_its_tabs(tab: Tab) -> None:
    page, run = tab.page, tab.id("cart/seed0")
    tab.go(f"#/run/{run}", ".topology")
    text = page.inner_text("main")
    assert "the learner bound this run" in text
    assert "sampler 3" in text
    assert "steps/s" in page.inner_html(".topology")
    tab.until(lambda: page.locator(".stack polygon").count() == 9)
    page.get_by_role("tab", name="Settings").click()
    page.select_option("select", label="cart/seed1")
    tab.until(lambda: page.locator("tr.differs").count() == 2)
    page.get_by_role("button", name="only differences").click()
    tab.until(lambda: page.locator(".settings tbody tr").count() == 2)
    page.get_by_role("tab", name="Faults").click()
    page.wait_for_selector("text=native code crashed")
    page.get_by_role("tab", name="Episodes").click()
    assert page.locator(".films figure").count() == 2
    tab.until(lambda: page.evaluate("[...document.querySelectorAll('.films img')].every((each) => each.naturalWidth)"))
    page.get_by_role("tab", name="Log").click()
    page.wait_for_selector("text=recovered")
    page.get_by_role("tab", name="Notes").click()
    page.fill("textarea", "to remember")
    page.get_by_role("button", name="Save").click()
    page.wait_for_selector("text=saved")
    assert page.get_by_role("button", name="Stop").is_disabled()


def test_every_topology_is_drawn_with_its_numbers_and_each_roles_time(tab: Tab) -> None:
    """No label lies over a box."""
    page, seen = tab.page, {}
    for kind in KINDS:
        tab.go(f"#/run/{tab.id(kind)}", f'.topology[aria-label$="{"sync" if kind == "rllib" else kind}"]')
        tab.until(lambda: page.locator(".stack polygon").count())
        seen[kind] = page.inner_text("main")
        assert page.evaluate(OVERLAPS) == [], kind
    assert "batch 3.5" in seen["central"]
    assert "busy 20 %" in seen["central"]
    assert "15.3" in seen["replay"]
    assert "12 % filled" in seen["replay"]
    assert "gradients · " in seen["shared-agent"]
    assert "sample 75 %" in seen["rllib"]
    assert "What bounds it: start-up 60%, sampling 30%, learning 10%" in seen["rllib"]


def test_a_search_is_drawn(tab: Tab) -> None:
    tab.go("#/tuning", ".parallel")
    assert tab.page.locator(".parallel polyline").count() == 7
    assert tab.page.locator("tr[data-trial]").count() == 8
    assert "71 %" in tab.page.inner_text(".importance")


def test_a_long_env_id_pushes_no_column_out_and_text_has_one_size(tab: Tab) -> None:
    tab.page.wait_for_selector("tr[data-id]")
    right = "e => e.getBoundingClientRect().right"
    assert tab.page.eval_on_selector("table.runs", right) <= SIZE["width"], "faults and age are not seen"
    tab.go("#/tuning", ".parallel")
    scale = "e => e.getBoundingClientRect().width / e.viewBox.baseVal.width"
    assert tab.page.eval_on_selector(".parallel", scale) == pytest.approx(1, abs=0.1), "its text grows with the window"


def test_scripts_in_names_are_text(tab: Tab) -> None:
    name = EVIL.replace("/", "")
    for where in (
        "#/runs",
        f"#/run/{tab.id(name)}",
        f"#/run/{tab.id(name)}?tab=settings",
        f"#/curves?runs={tab.id(name)}",
    ):
        tab.go(where)
        tab.page.wait_for_timeout(50)
    assert EVIL in tab.page.inner_text(".picklist")
    assert tab.page.locator("img[src=x]").count() == 0
    assert "owned" not in tab.page.title()


def test_without_the_token_the_page_says_what_to_do(browser: Any, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url.partition("#")[0])
    page.wait_for_selector("text=This page needs its token")
    assert "seed0" not in page.inner_text("body")
    page.goto(server.url)
    page.reload()
    page.wait_for_selector("text=cart/seed0")
    assert "token" not in page.url, "it does not stay in the address"
    context.close()


TOLD = "async (text) => (await import('/words.js')).told(text)"


def plain(text: str) -> str:
    """Without what stays as it is typed: options, settings, commands, names."""
    text = re.sub(r"`[^`]*`|--set \S+|--\w+( [\w:]+)?|\b[a-z_]+\.[a-z_.]+(=\S+)?", "", text)
    return re.sub(r"\b(RUN|torch|ray|inline|overlap|epochs|minibatch|native|CPU)\b|\(sudo.*?\)", "", text)


def sentences() -> list[str]:
    """What runs say of what bounds them, and of faults."""
    found: set[str] = set()
    base, _ = resolve({"env": "CartPole-v1", "preset": "none"})
    shares = [{name: 0.9, "rest": 0.1} for name in timing._BOUNDS] + [{"env": 0.3, "learner": 0.3, "rest": 0.3}]
    for runtime, topology, cores in product(("inline", "process", "ray"), ("sync", "async", "shared-agent"), (1, 4)):
        for samplers, lags in product((1, 4), (True, False)):
            sampling = replace(base.sampling, samplers=samplers)
            config = replace(base, runtime=runtime, topology=topology, sampling=sampling)
            for each in shares:
                found.add(timing.verdict(timing.Seen(each, config, cores, lags), lambda: "--samplers 4"))
                found.add(timing.verdict(timing.Seen(each, config, cores, lags)))
    for name in ("policy", "wire", "learner", "restart"):
        for busy in (0.1, 0.6, 0.98):
            found.add(timing._own_pace(timing.Seen({"busy": busy, name: 1 - busy}, base, 4, True)))
    for kind, cause in product(
        ("raised", "garbage", "hung", "memory", "died"), ("", "SIGSEGV", "SIGKILL", "node left")
    ):
        for role, actions in product(("learner", "sampler"), ({"restarted": 1}, {ENV_RESTARTED: 1})):
            group = FaultGroup(role, kind, cause)
            group.actions.update(actions)
            found.add(advice(group, {"faults": {"memory_mb": 100, "start_seconds": 60.0}}))
    return sorted(found)


def test_keys_chinese_and_dark(browser: Any, server: Server) -> None:
    tab = Tab(browser, server, locale="zh-CN", color_scheme="dark")
    page = tab.page
    page.wait_for_selector("text=运行")
    assert page.evaluate("document.documentElement.lang") == "zh"
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    left = {text: said for text in sentences() if re.search("[A-Za-z]{2}", plain(said := page.evaluate(TOLD, text)))}
    assert left == {}, "sentences that are not in Chinese"
    page.wait_for_selector("tr[data-id]")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("v")
    page.wait_for_selector(".u-over")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.keyboard.press("r")
    page.get_by_role("button", name="语言").click()
    page.wait_for_selector("h1:text('Runs')")
    tab.context.close()


def test_a_running_run_is_live_and_the_page_comes_back_after_a_restart(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", lines=20, ended=False)
    with lock.locked(run):
        server = Server([tmp_path / "runs"], port=0).start()
        tab.show(server)
        page, port = tab.page, server.port

        def report(step: int) -> None:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": step, "time": step / 1e4, "charts/episodic_return": 77.0, "charts/SPS": 5.0})
                    + "\n"
                )

        tab.go(f"#/run/{tab.until(lambda: tab.id('one'))}", ".tile")
        page.wait_for_selector(".chip.running")
        report(123_456)
        tab.until(lambda: "123,456" in page.inner_text(".tiles"))
        server.close()
        page.wait_for_selector("text=connection lost")
        report(234_567)
        server = Server([tmp_path / "runs"], port=port).start()
        page.wait_for_selector(".link.live")
        tab.until(lambda: "234,567" in page.inner_text(".tiles"))
        page.get_by_role("button", name="Stop").click()
        page.locator("dialog button.danger").click()
        tab.until(lambda: (run / "asked.stop").exists())
        shutil.rmtree(run, ignore_errors=True)
        tab.until(lambda: "This run is gone" in page.inner_text("main"))
        server.close()


MAIN = ["#/runs?by=folder", "#/curves?runs={}", "#/run/{}", "#/tuning"]
SHOWN = {"runs?": "tr[data-id]", "curves": ".u-over", "tuning": ".parallel"}
TABS = ["settings", "faults", "checkpoints", "episodes", "log", "notes"]


def problems(tab: Tab, views: list[str]) -> list[Any]:
    """What axe finds serious."""
    found = []
    tab.page.evaluate("delete window.trustedTypes")
    tab.page.evaluate(AXE.read_text())
    for view in views:
        shown = next((what for name, what in SHOWN.items() if name in view), ".tab-body > *")
        tab.go(view.format(tab.id("cart/seed0")), shown)
        result = tab.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        found += [
            (view, each["id"], [node["html"][:120] for node in each["nodes"][:3]])
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    return found


def test_axe_finds_no_serious_problem(browser: Any, server: Server) -> None:
    tab = Tab(browser, server, bypass_csp=True)
    found = problems(tab, MAIN)
    tab.context.close()
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1300, 390])
@pytest.mark.parametrize("look", ["light", "dark"])
def test_axe_finds_no_serious_problem_in_any_view(browser: Any, server: Server, look: str, width: int) -> None:
    tab = Tab(browser, server, color_scheme=look, bypass_csp=True, viewport={"width": width, "height": 850})
    found = problems(tab, [*MAIN, *(f"#/run/{{}}?tab={name}" for name in TABS)])
    tab.context.close()
    assert found == []


def test_on_a_phone_nothing_is_wider_than_the_screen(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 800})
    for view in [*MAIN, *(f"#/run/{{}}?tab={name}" for name in TABS)]:
        tab.go(view.format(tab.id("cart/seed0")))
        tab.page.wait_for_timeout(100)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390, view
        if "tab=" in view:
            shown = tab.page.locator(".tabs [aria-selected=true]").bounding_box()
            assert 0 <= shown["x"] < 390 - shown["width"] / 2, f"{view}: the tab that is open is in sight"


@pytest.mark.slow
def test_fifty_runs(browser: Any, tmp_path: Path) -> None:
    for seed in range(50):
        make_run(tmp_path / "runs" / f"run{seed:02d}", seed=seed, lines=200)
    with Server([tmp_path / "runs"], port=0) as server:
        tab = Tab(browser, server)
        tab.until(lambda: tab.page.locator("tr[data-id]").count() == 50)
        tab.page.locator("thead input").check()
        tab.page.get_by_role("button", name="Compare 50").click()
        tab.until(lambda: tab.page.locator(".pickrun input:checked").count() == 50)
        tab.until(lambda: "10k points" in points(tab), 20)
        tab.context.close()
        assert tab.errors == []


@pytest.mark.slow
def test_a_million_points_are_refined_on_zoom(browser: Any, tmp_path: Path) -> None:
    make_large(tmp_path / "runs" / "large")
    with Server([tmp_path / "runs"], port=0) as server:
        tab = Tab(browser, server)
        tab.until(lambda: tab.id("large"))
        tab.go(f"#/curves?runs={tab.id('large')}", ".u-over")
        tab.until(lambda: points(tab) == "1M points", 60)
        drag(tab, "charts/episodic_return", 0.30, 0.36)
        tab.until(lambda: "from=" in tab.page.url and "points" in points(tab) and "1M" not in points(tab))
        tab.context.close()
        assert tab.errors == []
