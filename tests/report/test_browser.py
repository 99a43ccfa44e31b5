"""The page in a real browser: Debian's Chromium, driven by Playwright.

Without them these tests fail; `scripts/setup --browser` installs both.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from controllers.commands.report import LOOPBACK, ReportServer
from tests.report.recorded_runs import (
    ACCURACY,
    examples,
    held_out,
    rollouts,
    write_run,
    write_trace,
)
from verl_ray.report.tracker import write_report
from verl_ray.tracking.evaluations import HeldOutScores, scores_path, write_scores
from verl_ray.tracking.history import begin_segment
from verl_ray.tracking.jsonl import METRICS, JsonlTracker
from verl_ray.tracking.rollouts import RolloutFiles

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DESKTOP = (1280, 900)
PHONE = (390, 844)

HOSTILE = [
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "\u2028\u2029\u202ewindow.hit = 1\u202c\u2066",
    "javascript:window.hit=1//'\"`${window.hit = 1}",
    "nul \0 and <svg onload=window.hit=1>",
    "--><!--<script>window.hit = 1",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "there is no chromium: scripts/setup --browser"
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers do not have.
        flags = ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


class Opened:
    """A page in a browser, with what it requested and complained about.

    Conditions to wait for are functions, which are compiled once. Expressions would be
    evaluated again and again, which the policy of the page forbids.
    """

    def __init__(
        self,
        browser: Browser,
        url: str,
        size: tuple[int, int] = DESKTOP,
        theme: str = "light",
    ) -> None:
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
        )
        self.page: Page = context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        began_s = time.monotonic()
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")
        self.seconds = time.monotonic() - began_s

    def tab(self, name: str) -> None:
        button = self.page.get_by_role("tab", name=name)
        button.click()
        # The content of the tab before may stand there for a moment.
        key = button.get_attribute("data-tab")
        self.page.wait_for_selector(f"main[data-tab={key}]")

    def count(self) -> str:
        self.page.wait_for_selector("#count")
        return self.page.locator("#count").inner_text()

    def width(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


def made(folder: Path, *others: Path) -> str:
    """Write the report of some runs, and return the URL of the file."""
    output = folder / "report.html"
    write_report([folder, *others], output)
    return output.as_uri()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_every_tab_draws_itself_without_a_request(
    browser: Browser, tmp_path: Path, size: tuple[int, int], theme: str
) -> None:
    folder = write_run(tmp_path / "run")
    write_trace(folder)
    opened = Opened(browser, made(folder), size, theme)
    page = opened.page
    assert "4 steps, 1 to 4" in page.locator(".finding").inner_text()
    assert page.locator(".made").inner_text().startswith("as of 20")
    assert "sums/acc/mean@1, +0.25 since step 0" in page.locator(".facts").inner_text()
    # In the middle of 8 problems two more are right.
    said = page.locator(".summary").inner_text()
    assert said.startswith("Held-out sums/acc/mean@1 rose from 0.375 at step 0 to")
    held_out = page.locator("section table").first.inner_text()
    assert "↑ higher is better" in held_out
    for tab in ("Curves", "Samples", "Time and memory", "Logs", "Settings", "Overview"):
        opened.tab(tab)
        page.wait_for_selector("main > :first-child")
        # Nothing makes the page wider than the screen.
        assert opened.width() <= size[0], tab
    opened.tab("Curves")
    page.wait_for_selector(".plot canvas")
    assert page.locator(".chart").first.inner_text().startswith("reward in training")
    assert "0.4" in page.locator(".chart .values").first.inner_text()
    opened.tab("Time")
    page.wait_for_selector("canvas.gantt")
    assert (
        page.get_by_label("step", exact=True).evaluate("menu => menu.options.length")
        == 2
    )
    # A step that is made again does not go on from the first time.
    steps = "stepsOfTrace(['step 4/9', 'step 5/9'], [0, 1, 7, 8], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0])"
    assert page.evaluate(
        f"{steps}.map(step => [step.title, step.start, step.end])"
    ) == [
        ["4", 0, 1],
        ["5", 1, 2],
        ["4, made again (2)", 7, 8],
        ["5, made again (2)", 8, 9],
    ]
    # Step 5 was broken off before other processes had noted work, step 6 after that.
    steps = "stepsOfTrace(['step 4/9', 'step 5/9', 'step 6/9', 'update'], [0, 0, 1, 2, 2], [1, 1, 1, 1, 1], [0, 3, 1, 2, 3], [0, 1, 0, 0, 1])"
    for finished, chosen in ((5, "4"), (6, "6")):
        assert page.evaluate(f"lastWholeStep({steps}, {finished}).title") == chosen
    # What is cut has a shadow.
    shades = "getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert page.evaluate(shades) == "local, local, scroll, scroll"
    # A finding leads to its curve.
    opened.tab("Overview")
    page.locator(".finding button.mono").click()
    page.wait_for_function(
        "() => document.querySelectorAll('#panels .chart').length === 1"
    )

    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(20, 23, 26)") == (theme == "dark")
    assert opened.requests == [opened.page.url.partition("#")[0]]
    assert opened.complaints == []


def test_rows_are_filtered_sorted_and_set_side_by_side(
    browser: Browser, tmp_path: Path
) -> None:
    opened = Opened(browser, made(write_run(tmp_path / "run")) + "#samples")
    page = opened.page
    assert opened.count().startswith("20 of 20 responses")
    page.get_by_label("from", exact=True).select_option("training")
    page.wait_for_function(
        "() => document.querySelector('#count').innerText.startsWith('16 of')"
    )
    page.get_by_label("step", exact=True).select_option("3")
    page.wait_for_function(
        "() => document.querySelector('#count').innerText.startsWith('4 of')"
    )
    page.get_by_label("reward from").fill("0.5")
    page.get_by_label("reward from").press("Enter")
    page.wait_for_function(
        "() => document.querySelector('#count').innerText.startsWith('2 of')"
    )
    page.get_by_role("button", name="clear").click()
    page.wait_for_function(
        "() => document.querySelector('#count').innerText.startsWith('20 of')"
    )
    page.get_by_label("failure", exact=True).select_option("any failure")
    page.wait_for_function(
        "() => document.querySelector('#count').innerText.startsWith('8 of')"
    )
    page.get_by_role("button", name="clear").click()
    page.get_by_label("sort", exact=True).select_option("rewardDown")
    page.wait_for_function("() => document.querySelector('.item b').innerText === '1'")
    page.get_by_label("sort", exact=True).select_option("rewardUp")
    page.wait_for_function("() => document.querySelector('.item b').innerText === '0'")

    # The keyboard moves through the list.
    page.get_by_label("from", exact=True).select_option("training")
    page.wait_for_function(
        "() => document.querySelector('#count').innerText.startsWith('16 of')"
    )
    page.locator(".item").first.click()
    page.wait_for_selector(".item:nth-child(1)[aria-selected=true]")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".item:nth-child(2)[aria-selected=true]")

    page.get_by_role("button", name="its group").click()
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 2")
    page.get_by_role("button", name="its prompt over the steps").click()
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 8")
    assert opened.complaints == []


def test_examples_and_pairs_show_what_was_learned_from(
    browser: Browser, tmp_path: Path
) -> None:
    folders = [write_run(tmp_path / name, name=name, steps=0) for name in "ab"]
    for folder, labels in zip(folders, (("", ""), ("chosen", "rejected")), strict=True):
        RolloutFiles(folder, 1).write(1, examples(1, labels).encoded())
    # Two runs of the same task.
    opened = Opened(browser, made(folders[0], folders[0]) + "#samples")
    page = opened.page
    page.get_by_label("from", exact=True).select_option("training")
    page.wait_for_selector(".item b >> text=loss 1")
    assert page.locator(".item .question").first.inner_text() == "1+2="
    page.get_by_role("button", name="its prompt in each run").click()
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 2")
    token = page.locator(".text-block span[title]").first
    assert token.get_attribute("title") == "loss 1.000"
    assert page.locator(".text-block .given").first.inner_text() == "1+2="
    assert opened.complaints == []

    opened = Opened(browser, made(folders[1]) + "#samples")
    page = opened.page
    page.get_by_label("from", exact=True).select_option("training")
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 2")
    assert page.locator(".item b").all_inner_texts() == ["margin 2"]
    texts = page.locator(".sample .pairs").all_inner_texts()
    assert ["rejected" in text for text in texts] == [False, True]
    assert opened.complaints == []


def test_tokens_are_coloured_by_their_values(browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, made(write_run(tmp_path / "run")) + "#samples")
    page = opened.page
    page.get_by_label("from", exact=True).select_option("training")
    page.wait_for_selector(".text-block span[title]")
    token = page.locator(".text-block span[title]").first
    title = token.get_attribute("title")
    assert title == "log-prob -0.500, of the trainer -0.250, advantage 0.500, version 0"

    shade = "getComputedStyle(document.querySelector('.text-block span[title]')).backgroundColor"
    shades = [page.evaluate(shade)]
    for coloring in ("none", "logProb", "difference", "advantage", "version"):
        page.get_by_label("colour by").select_option(coloring)
        page.wait_for_function(f"before => {shade} !== before", arg=shades[-1])
        shades.append(page.evaluate(shade))
    assert len(set(shades)) == 6 and shades[1] == "rgba(0, 0, 0, 0)"
    # No token of the prompt is coloured, and all of it is there.
    assert page.locator(".text-block .given").all_inner_texts() == ["1+2="]
    assert page.locator(".text-block .turn").count() == 0


def test_turns_of_an_episode_are_framed(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    table = rollouts(5, [("ask", "call")], members=1, observation="it says ")
    # Another episode has two rows.
    two_rows = rollouts(6, [("ask", "call")], members=2, observation="it says ")
    parts = {"member": [0, 0], "row": [0, 1], "turns": [[0, 2], [1, 3]]}
    two_rows = replace(two_rows, rows={**two_rows.rows, **parts})
    RolloutFiles(folder, most_mb=100).write(6, two_rows.encoded())
    RolloutFiles(folder, most_mb=100).write(5, table.encoded())
    opened = Opened(browser, made(folder) + "#samples")
    page = opened.page
    page.get_by_label("step", exact=True).select_option("5")
    page.wait_for_selector(".text-block .turn")
    turns = page.locator(".text-block .turn")
    assert turns.all_text_contents() == ["call", "call"]
    numbers = [turns.nth(i).get_attribute("data-turn") for i in range(2)]
    assert numbers == ["1, reward 0.25", "2, reward 0"]
    # What was masked stands apart, before the first turn and between two.
    assert page.locator(".text-block .given").all_text_contents() == ["ask", "it says "]
    assert page.locator(".text-block .between").all_text_contents() == ["it says "]
    assert page.locator(".given [title]").count() == 0

    page.get_by_label("step", exact=True).select_option("6")
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 2")
    assert (
        opened.count().startswith("1 of 22 episodes")
        and page.locator(".item").count() == 1
    )
    assert page.locator(".item b").inner_text() == "1"
    numbers = [turns.nth(i).get_attribute("data-turn") for i in range(4)]
    assert [number.partition(",")[0] for number in numbers if number] == [
        "1",
        "3",
        "2",
        "4",
    ]
    assert opened.complaints == []


def test_runs_are_laid_over_each_other_and_zoom_together(
    browser: Browser, tmp_path: Path
) -> None:
    folders = [
        write_run(tmp_path / name, lr=lr, name=name, steps=9)
        for name, lr in (("low", 1e-6), ("high", 1e-5), ("higher", 1e-4))
    ]
    opened = Opened(browser, made(*folders) + "#curves")
    page = opened.page
    page.wait_for_selector(".plot canvas")
    first = page.locator(".chart .values").first
    assert [text.split()[0] for text in first.locator("i").all_inner_texts()[1:]] == [
        "low",
        "high",
        "higher",
    ]
    parts = "distinctParts(['val-core/a/acc/mean@1', 'val-core/b/acc/mean@1'])"
    assert page.evaluate(parts) == ["a/acc/mean@1", "b/acc/mean@1"]
    differences = page.locator("#differences tbody tr")
    assert differences.count() == 1
    assert differences.inner_text().split() == [
        "actor.optimizer.lr",
        "0.000001",
        "0.00001",
        "0.0001",
    ]

    page.get_by_role("button", name="higher").click()
    page.wait_for_function(
        "() => document.querySelector('.chart .values')?.querySelectorAll('i').length === 3"
    )
    box = page.locator(".plot .u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function("() => sharedZoom !== null")
    ranges = page.evaluate("[...openCharts].map(chart => chart.scales.x.max)")
    assert len(set(ranges)) == 1 and len(ranges) > 2 and ranges[0] < 9
    page.get_by_role("button", name="all steps").click()
    page.wait_for_function(
        "() => [...openCharts].every(chart => chart.scales.x.max === 9)"
    )

    page.get_by_label("Name of a metric").fill("TIMING_S")
    page.wait_for_function(
        "() => document.querySelectorAll('#panels .chart').length === 3"
    )
    assert opened.complaints == []


def test_an_address_names_a_step_and_legends_have_its_values(
    browser: Browser, tmp_path: Path
) -> None:
    folders = [write_run(tmp_path / "long", steps=9), write_run(tmp_path / "short")]
    # The checkpoint of step 3 is on the next line.
    path = folders[0] / METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["timing_s/save_checkpoint"] = 7.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = Opened(browser, made(*folders) + "#curves")
    page = opened.page
    legend = page.locator(".chart .values").first
    page.wait_for_selector(".plot canvas")
    assert legend.inner_text().split() == ["step", "9", "sums", "0.9", "sums", "–"]
    page.evaluate("location.hash = 'curves/3'")
    page.wait_for_function(
        "() => document.querySelector('.chart .values').innerText.startsWith('step 3')"
    )
    assert legend.inner_text().split() == ["step", "3", "sums", "0.3", "sums", "0.3"]
    legend.locator("button").click()
    page.wait_for_selector("#count")
    assert opened.count().startswith("8 of ")
    assert page.get_by_label("step", exact=True).input_value() == "3"

    opened = Opened(browser, made(*folders) + "#time/3")
    page = opened.page
    page.wait_for_selector(".plot canvas")
    legend = page.locator(".chart .values").first
    assert legend.inner_text().split()[-2:] == ["7.0", "s"]
    # A click marks another step, and the values are those of that one.
    box = page.locator(".plot .u-over").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 0.55 * box["width"], box["y"] + 50)
    page.wait_for_function("() => location.hash === '#time/5'")
    page.wait_for_function(
        "() => document.querySelector('.chart .values').innerText.startsWith('step 5')"
    )
    assert legend.inner_text().split()[-2:] == ["checkpoints", "–"]
    events = (
        "isEvent('timing_s/testing', [1]) && isEvent('timing_s/sync', [1, NaN, NaN])"
    )
    assert page.evaluate(f"{events} && !isEvent('timing_s/gen', [1, 1])")
    assert opened.complaints == []


def test_runs_are_compared_by_metric_and_what_was_set_by_hand(
    browser: Browser, tmp_path: Path
) -> None:
    folders = [
        write_run(tmp_path / name, name=name, lr=lr, command=f"verl-ray train {typed}")
        for name, lr, typed in (
            ("low", 1e-6, "run.total_epochs=2"),
            ("high", 1e-5, "actor.optimizer.lr=1e-5"),
        )
    ]
    # The last evaluation of the second run has lost two problems.
    scores, names = held_out(2), [ACCURACY] * 6
    lessened = HeldOutScores(range(6), scores.digests[:6], names, scores.scores[:6])
    write_scores(scores_path(folders[1], 4), lessened)
    opened = Opened(browser, made(*folders))
    page = opened.page
    rows = page.locator("#differences tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [
        ["run.total_epochs", "2", "by", "hand", "–"],
        ["actor.optimizer.lr", "0.000001", "0.00001", "by", "hand"],
    ]
    comparison = page.locator(".comparison")
    assert comparison.count() == 1
    texts = comparison.inner_text()
    assert "sums/acc/mean@1 ↑ higher is better" in texts
    assert "difference to low, paired" in texts
    # Both came to the same scores.
    assert comparison.locator("tbody tr").nth(1).inner_text().split()[-9:] == [
        "0", "on", "6", "of", "8", "problems", "0.625", "at", "4",
    ]  # fmt: skip
    opened.tab("Settings")
    typed = page.locator(".typed tbody tr").all_inner_texts()
    assert [row.split() for row in typed] == [
        ["run.total_epochs", "2", "run.total_steps", "=", "4"],
        ["actor.optimizer.lr", "1e-5", "1e-05"],
    ]
    assert page.locator(".chip", has_text="by hand").count() == 3
    assert opened.complaints == []


def test_hostile_texts_run_nothing(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        texts=[(text, text) for text in HOSTILE],
        name="".join(HOSTILE).replace("\0", ""),
        source=HOSTILE[1],
        extra={f"{text}/m": 1.0 for text in [*HOSTILE, "__proto__"]},
    )
    write_trace(folder, HOSTILE[1])
    (folder / "logs").mkdir()
    (folder / "logs" / "<img onerror=hit>-0.log").write_text(
        f"ValueError: {HOSTILE[1]}\n"
    )
    opened = Opened(browser, made(folder))
    page = opened.page
    for tab in ("Curves", "Samples", "Time and memory", "Logs", "Settings"):
        opened.tab(tab)
        page.wait_for_selector("main > :first-child")
        if tab == "Curves":
            page.evaluate(
                "document.querySelectorAll('details').forEach(d => d.open = true)"
            )
    opened.tab("Samples")
    page.get_by_label("from", exact=True).select_option("training")
    for mode, count in (("its group", 2), ("its prompt over the steps", 8)):
        page.get_by_role("button", name=mode).click()
        page.wait_for_function(
            "count => document.querySelectorAll('.sample').length === count", arg=count
        )
    texts = page.locator("main").inner_text()
    assert "</script><script>window.hit = 1</script>" in texts

    assert page.evaluate("window.hit === undefined")
    assert page.locator("main img, main svg, main script, main a").count() == 0
    # Marks that turn the direction of text are named instead.
    assert "\u202e" not in texts
    hidden = "visible('\\u00ad\\u061c\\u{e0041}')"
    assert page.evaluate(hidden) == "⟨U+00AD⟩⟨U+061C⟩⟨U+E0041⟩"
    assert opened.complaints == [] and len(opened.requests) == 1


def write_large_run(folder: Path) -> None:
    """Write 10,000 steps of 150 metrics, and 5,000 rows of 200 tokens."""
    random = np.random.default_rng(0)
    names = [f"group_{i % 10}/metric_{i}" for i in range(147)]
    names += ["critic/rewards/mean", "response_length/mean", "actor/kl_loss"]
    begin_segment(folder, 0, time.time() - 1e5)
    tracker = JsonlTracker(folder)
    for step, values in enumerate(random.normal(size=(10_000, 150)).tolist(), start=1):
        tracker.log(
            step,
            {"training/global_step": step, **dict(zip(names, values, strict=True))},
        )
    tracker.close(failed=False)

    files = RolloutFiles(folder, most_mb=1000)
    words = np.array(["one", "two", "seven", "left", "=", "+", "therefore", "so"])
    for step in range(100, 10_001, 100):
        texts = [
            (f"{step + i}+2=", " ".join(random.choice(words, 40).tolist()))
            for i in range(25)
        ]
        files.write(step, rollouts(step, texts).encoded())


def test_ten_thousand_steps_and_five_thousand_rows_are_usable_at_once(
    browser: Browser, tmp_path: Path
) -> None:
    write_large_run(tmp_path)
    url = made(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 15e6
    opened = Opened(browser, url)
    page = opened.page
    page.wait_for_selector(".plot canvas")
    opened.tab("Samples")
    assert opened.count().startswith("5,000 of 5,000 responses")
    # Only what is in view exists.
    assert page.locator(".item").count() < 60
    page.get_by_label("sort", exact=True).select_option("step")
    page.wait_for_function(
        "() => document.querySelector('.item .top').innerText.includes('10000')"
    )
    opened.tab("Curves")
    page.wait_for_selector(".plot canvas")
    assert opened.complaints == []
    print(f"usable after {opened.seconds:.2f} s")


def test_a_served_page_follows_its_run(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="stopped")
    with ReportServer([folder], LOOPBACK, 0, token="") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            opened = Opened(browser, server.address)
            page = opened.page
            assert "4 of 4" in page.locator(".facts").inner_text()
            opened.tab("Samples")
            assert opened.count().startswith("20 of 20 responses")
            # The second problem of the first evaluation.
            page.locator(".item").nth(1).click()
            page.wait_for_selector(".item:nth-child(2)[aria-selected=true]")
            selected = page.locator(".item[aria-selected=true]").inner_text()
            top = "document.getElementById('list').scrollTop"
            page.evaluate(f"{top} = 100")
            tracker = JsonlTracker(folder, committed_step=4)
            tracker.log(5, {"training/global_step": 5, "critic/rewards/mean": 1.0})
            tracker.close(failed=False)
            assert (folder / METRICS).exists()
            table = rollouts(5, [("a", "b")])
            RolloutFiles(folder, most_mb=10).write(5, table.encoded())
            page.wait_for_selector("#count:has-text('22 of 22')", timeout=60_000)
            # Rows have other places now, and the same one is selected.
            assert page.locator(".item[aria-selected=true]").inner_text() == selected
            page.wait_for_function(f"() => {top} === 100")
            opened.tab("Overview")
            page.wait_for_selector(".facts:has-text('5 of 4')", timeout=60_000)
            assert {url.split("?")[0] for url in opened.requests} == {server.address}
            assert opened.complaints == []
        finally:
            server.shutdown()
            thread.join()
