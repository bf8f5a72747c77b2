"""The report of a study: one page without network, escaped, readable without its pictures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.search import event_stream

from memtune import cli
from memtune.autotune.report import write_report
from memtune.autotune.report.pictures import WIDTH, memory, waterfall
from memtune.autotune.search.search_events import EventLog, SearchFinished
from memtune.errors import EnvironmentFault

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TIMELINE = {
    "device": {
        "time_s": [0.0, 0.5, 1.2],
        "bytes_by_kind": {"weights": [2**26, 2**26, 2**26], "activations": [0, 2**28, 2**20]},
    },
    "streams": {
        "compute": [("forward", 0.0, 0.5), ("backward", 0.5, 1.0), ("optimizer", 1.0, 1.2)],
        "device_to_host": [("forward", 0.1, 0.4)],
    },
}
TIMELINES = {
    "schema": 1,
    "summaries": {"plain": "mb 8", "chosen": "mb 8 · selective"},
    "timelines": {"plain": TIMELINE, "chosen": TIMELINE},
    "waterfall": [
        {"setting": "plain", "step_s": 1.2, "peak_bytes": 2**29},
        {"setting": "recompute: selective", "step_s": 1.4, "peak_bytes": 2**28},
        {"setting": "sharding.states: fsdp", "unfit": "needs two ranks"},
        {"setting": "chosen", "step_s": 1.4, "peak_bytes": 2**28},
    ],
}


def study(folder: Path, events: list, timelines: object = TIMELINES) -> Path:
    """Write a study and return its event log."""
    log = folder / ".memtune" / "s" / "events.jsonl"
    with EventLog(log) as stream:
        for each in events:
            stream.write(each)
    if timelines is not None:
        (log.parent / "timelines.json").write_text(json.dumps(timelines))
    return log


class Reader(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_complete_offline_small_and_well_formed(tmp_path):
    out = write_report(study(tmp_path, event_stream.all_events()), tmp_path / "report.html")
    text = out.read_text()
    assert len(text) < 5 * 2**20
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=|url\(|@import", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    page = Reader(text)
    assert page.open == []
    drawings = [attributes for tag, attributes in page.elements if tag == "svg"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(drawings) == 5
    assert len(ids) == len(set(ids))
    for each in drawings:
        assert each["role"] == "img"
        assert set(each["aria-labelledby"].split()) <= set(ids)
    for words in (
        "measured18.9 samples/s, peak 571 MiB",
        "peakbatchsetting",
        "recompute every_nth(2) · fsdp · micro-batch 8",
        "memtune run tuned.yaml -- torchrun --nproc-per-node=2 train.py",
        "Time against memory, measured",
        "Memory of a step by kind, simulated",
        "Timeline of a step, simulated",
        "From the plain setting to the chosen one, simulated",
        "Predicted against measured",
        "not alone: needs two ranks",
        "crash: rank 1: RuntimeError: shapes differ",
        "Of 214 candidates 2 cannot fit",
        "41.70 s571 MiB",  # trial 4: the median of its 1.69 s and the 1.70 s of its confirmation
    ):
        assert words in page.text


def test_page_escapes_text_of_the_study(tmp_path):
    evil = "<script>alert('x')</script>\"&"
    events = [
        each.model_copy(
            update={name: evil for name in ("workload", "summary", "message", "name") if hasattr(each, name)}
        )
        for each in event_stream.all_events()
    ]
    timelines = json.loads(json.dumps(TIMELINES).replace("mb 8", evil.replace('"', '\\"')))
    text = write_report(study(tmp_path, events, timelines), tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert evil in Reader(text).text


def test_page_of_an_interrupted_search_says_so_and_has_no_timelines(tmp_path):
    events = [*event_stream.all_events()[:-1], SearchFinished(status="interrupted", message="stopped by you")]
    page = Reader(write_report(study(tmp_path, events, None), tmp_path / "r.html").read_text())
    assert "This search was interrupted: stopped by you. Done: 9 of 10 trials and 1 repeat." in " ".join(
        page.text.split()
    )
    assert page.text.count("the study has no timelines") >= 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"timelines": {"plain": {"time_s": []}}}, "damaged"),
        ([1], "damaged"),
        (
            {"timelines": {"a": {**TIMELINE, "device": {**TIMELINE["device"], "time_s": [0.0]}}}},
            "one value per time",
        ),
    ],
)
def test_damaged_timelines_are_one_message(damage, words, tmp_path):
    log = study(tmp_path, event_stream.all_events(), damage)
    with pytest.raises(EnvironmentFault) as caught:
        write_report(log, tmp_path / "r.html")
    assert words in str(caught.value)


def test_front_has_one_mark_per_setting(tmp_path):
    events = event_stream.all_events()
    again = event_stream.trial_events((10, *event_stream.TRIALS[8][1:]))
    once = write_report(study(tmp_path / "once", events), tmp_path / "once.html").read_text()
    twice = write_report(study(tmp_path / "twice", [*events, *again]), tmp_path / "twice.html").read_text()
    settings = re.search(r"(\d+) settings. Fastest that fits", once)
    assert settings
    assert settings[0] in twice


def test_report_command_finds_the_study_and_keeps_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study(tmp_path, event_stream.all_events())
    assert cli.run(["report", "s", "-o", "report.html", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"schema": 1, "out": "report.html", "bytes": Path("report.html").stat().st_size}
    assert cli.run(["report"]) == 2  # the last study; its page exists
    assert "--force to replace it, or --out another.html" in capsys.readouterr().err
    assert cli.run(["report", "other"]) == 3
    assert "Known: s." in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_chromium_renders_and_prints_the_page(tmp_path):
    out = write_report(study(tmp_path, event_stream.all_events()), tmp_path / "report.html")
    assert CHROMIUM is not None
    shared = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    paper = tmp_path / "report.pdf"
    done = subprocess.run(
        [*shared, "--enable-logging=stderr", f"--print-to-pdf={paper}", out.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    assert paper.stat().st_size > 20_000
    dom = subprocess.run(
        [*shared, "--dump-dom", out.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert dom.stdout.count("<svg ") == 5


def test_texts_of_the_waterfall_are_inside_the_frame() -> None:
    rows = [{"setting": each, "step_s": 1.2, "peak_bytes": 1023 * 2**20} for each in ("plain", "chosen")]
    texts = re.findall(
        r'<text x="([\d.]+)" y="[\d.]+" text-anchor="start"[^>]*>([^<]*)<', waterfall(rows, 2**30).svg
    )
    assert "1023 MiB" in {text for _, text in texts}
    assert [text for x, text in texts if float(x) + 7.5 * len(text) > WIDTH] == []


def test_memory_picture_gives_the_bytes_under_the_pointer() -> None:
    hints = re.findall(
        r'fill="transparent"><title>([^<]*)</title>', memory({"plain": TIMELINE["device"]}, None).svg
    )
    assert hints[0] == "64.0 MiB at 0.00 ms\nweights 64.0 MiB"
    assert "320 MiB at 500 ms\nactivations 256 MiB\nweights 64.0 MiB" in hints
    assert hints.index("320 MiB at 500 ms\nactivations 256 MiB\nweights 64.0 MiB") == len(hints) * 5 // 12
    assert hints[-1] == "65.0 MiB at 1.20 s\nactivations 1.00 MiB\nweights 64.0 MiB"
