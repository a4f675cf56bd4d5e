"""The report in a real browser: runs with odd values beside an ordinary one, hostile text, two sizes of window."""

import json
import shutil

import pytest
from builders import addition_file, tiny_model, tiny_run
from chromium import Chromium, find_chromium

from d3s_megatron.audit import read_audit
from d3s_megatron.audit.files import write_table
from d3s_megatron.report.__main__ import main as report
from d3s_megatron.train import main as train

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028&amp;"
UNICODE = "\u00e9\u4e2d\U0001f600\u202ex"
NAMES = ["plain", "not-finite", "one-step", "long", "<img src=x onerror=window.hacked=1>"]
READY = "document.documentElement?.dataset.ready"


def rewrite(run, change):
    """The log's rows, each as `change` returns it."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


def hostile_audit(path):
    audit = read_audit(path)
    rows = audit.table.to_pylist()
    for row in rows:
        if row["pieces"] is not None:
            row["pieces"] = [HOSTILE, UNICODE, "a\nb", *row["pieces"][3:]][: len(row["pieces"])]
        row["reason"] = HOSTILE if row["reason"] != "kept" else "kept"
    for prompt in audit.meta["prompts"].values():
        prompt |= {"text": HOSTILE, "answer": UNICODE, "id": HOSTILE}
    audit.meta["reasons"] = {HOSTILE if name != "kept" else name: num for name, num in audit.meta["reasons"].items()}
    write_table(type(audit.table).from_pylist(rows, schema=audit.table.schema), audit.meta, path)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    model, data = tiny_model(folder / "model"), addition_file(folder / "train.jsonl")
    runs = {name: folder / name for name in NAMES}
    settings = tiny_run(model, data, runs["plain"], 2) | {"audit.tokens_every": 1, "train.export": "false"}
    train([part for key, value in settings.items() for part in (f"--{key}", str(value))])
    for name in NAMES[1:]:
        shutil.copytree(runs["plain"], runs[name])
    numbers = ("reward", "loss", "grad_norm", "entropy", "kl")
    rewrite(runs["not-finite"], lambda rows: [row | dict.fromkeys(numbers) if row["step"] else row for row in rows])
    rewrite(runs["one-step"], lambda rows: [row for row in rows if "progress" in row][:1])  # and no evaluation
    shutil.rmtree(runs["one-step"] / "audit")
    step = [json.loads(line) for line in (runs["long"] / "log.jsonl").read_text().splitlines()][1]
    rewrite(
        runs["long"], lambda _: [step | {"step": i, "reward": 1.0 + (i == 4321) + i % 7 / 10} for i in range(10_000)]
    )
    for path in sorted((runs[NAMES[4]] / "audit").iterdir()):
        hostile_audit(path)
    (runs[NAMES[4]] / "log.jsonl").open("a").write('{"step": 2, "rew')  # it goes on
    out = folder / "report.html"
    assert report([*map(str, runs.values()), "-o", str(out)]) == 0
    return out


def test_the_file_is_one_of_a_sane_size_that_names_no_model_text_as_html(page):
    text = page.read_text(encoding="utf-8")
    assert len(text) < 7_000_000
    assert "window.hacked=1>" not in text and "<img" not in text.split("</style>")[0]


@pytest.fixture(scope="module")
def browser(page, tmp_path_factory):
    if find_chromium() is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        chromium.open(page, READY)
        yield chromium


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def test_it_opens_without_an_error_and_asks_no_network(browser):
    assert browser.errors == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data", "blob"}
    assert browser.run("window.hacked") is None


def test_every_run_is_plotted_and_a_spike_of_a_long_one_survives(browser):
    points = browser.run("document.getElementById('panel-0').data.map(t => t.y.filter(y => y !== null).length)")
    assert points[0] == 2 and points[1:3] == [1, 1] and 500 < points[3] <= 1001
    assert browser.run("Math.max(...document.getElementById('panel-0').data[3].y)") == 2.0 + 4321 % 7 / 10
    drawn = "document.querySelectorAll('#panel-0 .scatterlayer path.js-line, #panel-0 .scatterlayer path.point').length"
    assert browser.run(drawn) >= 5
    assert browser.run("document.querySelectorAll('#reasons .scatterlayer .js-fill').length") >= 1
    assert browser.run("document.querySelectorAll('#scores .heatmaplayer image').length") == 1


def test_a_click_changes_the_axis_and_another_hides_a_run(browser):
    browser.click("#axis button", 1)
    assert browser.run("document.getElementById('panel-0').layout.xaxis.title.text") == "tokens trained"
    assert browser.run("document.getElementById('panel-0').data[0].x.every(x => x > 0)")
    browser.click("#runs button", 3)
    assert browser.run("document.getElementById('panel-0').data.length") == 4
    browser.click("#runs button", 3)
    browser.click("#axis button", 0)
    browser.click("#smooth")  # the spike of the long run is then a bump, and short curves are as they were
    assert 1 < browser.run("Math.max(...document.getElementById('panel-0').data[3].y)") < 2
    assert browser.run("document.getElementById('panel-0').data[0].y.length") == 2
    browser.click("#smooth")


def test_a_click_shows_a_rollout_with_its_kept_tokens_marked(browser):
    rows = browser.run("document.querySelectorAll('#rollouts button').length")
    shown = browser.run("data.runs[0].tokens.at(-1).prompts[document.getElementById('token-prompt').selectedIndex]")
    assert rows == len(shown["rollouts"]) == 4
    for number in (3, 0):
        browser.click("#rollouts button", number)
        rollout = shown["rollouts"][number]
        assert text(browser, "#tokens") == "".join(rollout["pieces"])
        marked = browser.run("document.querySelectorAll('#tokens .token.kept').length")
        assert marked == rollout.get("mask", "").count("1") == rollout["num_kept_tokens"]
        assert f"Rollout {number + 1} of" in text(browser, "#facts")


def choose(browser, selector, number):
    element = f"document.querySelector({json.dumps(selector)})"
    browser.run(f"{element}.selectedIndex = {number}; {element}.dispatchEvent(new Event('change'))")


def test_hostile_and_foreign_text_is_shown_as_text(browser):
    choose(browser, "#token-run", 2)  # one-step has no audit: nothing to show, and no error
    assert "holds no tokens" in text(browser, "#rollouts")
    choose(browser, "#token-run", 4)
    choose(browser, "#selection-run", 4)
    browser.click("#rollouts button", 1)
    assert HOSTILE in text(browser, "#prompt") and UNICODE in text(browser, "#prompt")
    assert text(browser, "#tokens").startswith(HOSTILE + UNICODE)
    assert browser.run("document.querySelectorAll('main img, main script, #tokens img').length") == 0
    assert browser.run("window.hacked") is None and browser.errors == []


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_wider_than_the_window(browser, page, width, tmp_path):
    browser.resize(width, 900)
    browser.open(page, READY)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('#panel-0 .scatterlayer .trace').length") == 5
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
