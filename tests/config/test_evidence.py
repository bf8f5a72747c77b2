"""`tuned.yaml` for people and the evidence next to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtune.config import MadeFor, TunedConfig, load_config, save
from memtune.errors import ConfigError

SETTINGS = {
    "execution": {"micro_batch": 4, "accumulate": 2},
    "recompute": {"kind": "attention_boundary"},
    "sharding": {"states": {"kind": "fsdp", "degree": 2}},
}


def tuned(settings: object = SETTINGS) -> TunedConfig:
    measured = {
        "samples_per_s": 10.3951234,
        "step_s": 0.7695871,
        "spread_s": 0.00412,
        "peak_bytes": 559_939_584,
        "baselines": {"plain": {"status": "oom"}, "full recompute": {"step_s": 0.931}},
    }
    read = load_config(
        {
            "settings": settings,
            "measured": measured,
            "predicted": {"step_s": 0.77, "peak_bytes": 559_939_584},
            "certificate": {"fits": True, "budget_bytes": 540 * 2**20},
            "plan": {"offload.states": {"slots": 3}},
        }
    )
    return read.model_copy(update={"made_for": MadeFor(model="sha256:0123", parameters=12, ranks=2)})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return save(tuned(STRONGHOLD), tmp_path / "tuned.yaml")


STRONGHOLD = {**SETTINGS, "recompute": {"kind": "full"}, "offload": {"states": {"kind": "stronghold"}}}


def test_saved_config_is_read_exactly(written: Path):
    assert load_config(written).document() == tuned(STRONGHOLD).document()


def test_file_for_people_is_short_and_says_what_each_setting_does(written: Path):
    lines = written.read_text().splitlines()
    assert len(lines) <= 25
    text = "\n".join(lines)
    assert "  recompute: {kind: full}  # recomputes every block in backward (Chen et al. 2016)" in lines
    assert "    states: {kind: stronghold}  # keeps the blocks in host memory, with as many as fit" in text
    assert 'samples_per_s: 10.4, step: "770 ms ± 4.12 ms", peak: "534 MiB of 540 MiB"' in text
    assert 'plain step: out of memory, full recompute step: "931 ms"' in text
    assert "certificate" not in text
    assert "slots" not in text


def test_file_for_people_has_rates_of_three_digits(tmp_path: Path):
    config = tuned(STRONGHOLD)
    config = config.model_copy(update={"measured": {"samples_per_s": 29_712.345}})
    assert "samples_per_s: 29700}" in save(config, tmp_path / "tuned.yaml").read_text()


@pytest.mark.parametrize("confirmed", [True, False])
def test_file_of_a_stopped_search_says_that_it_is_not_confirmed(confirmed: bool, tmp_path: Path):
    config = tuned(STRONGHOLD)
    config = config.model_copy(
        update={"certificate": config.certificate | {"confirmed_in_fresh_process": confirmed}}
    )
    text = save(config, tmp_path / "tuned.yaml").read_text()
    assert ("of a search that was stopped, not confirmed" in text) != confirmed
    assert ("# in fresh processes" in text) == confirmed


def test_file_without_evidence_keeps_its_settings(written: Path):
    kept = [line for line in written.read_text().splitlines() if not line.startswith("evidence:")]
    written.write_text("\n".join(kept))
    read = load_config(written)
    assert read.settings == tuned(STRONGHOLD).settings
    assert read.plan == {}


@pytest.mark.parametrize("damage", ["missing", "changed", "text", "elsewhere"])
def test_missing_or_changed_evidence_is_one_message(damage: str, written: Path):
    evidence = written.parent / "tuned.evidence.json"
    source: str | Path = written
    if damage == "missing":
        evidence.unlink()
    elif damage == "changed":
        evidence.write_text(evidence.read_text().replace("true", "false"))
    elif damage == "text":
        source = written.read_text()
    else:
        written.write_text(written.read_text().replace("tuned.evidence", "../tuned.evidence"))
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert caught.value.code == ("MT202" if damage == "elsewhere" else "MT211")
    assert "evidence" in str(caught.value)
    assert caught.value.fix


def test_plan_of_the_evidence_is_checked(written: Path, tmp_path: Path):
    evidence = json.loads((tmp_path / "tuned.evidence.json").read_text())
    evidence["plan"]["offload.states"]["slots"] = "rm -rf"
    from memtune.config.evidence import people_text

    text = json.dumps(evidence)
    config = tuned(STRONGHOLD)
    (tmp_path / "tuned.evidence.json").write_text(text)
    written.write_text(people_text(config.document(), {}, "tuned.evidence.json", text))
    with pytest.raises(ConfigError, match="slots"):
        load_config(written)


def test_plan_holds_only_for_the_technique_it_was_made_for(written: Path):
    text = written.read_text()
    written.write_text(text.replace("{kind: full}", "{kind: selective}"))
    read = load_config(written)
    assert read.plan == tuned(STRONGHOLD).plan  # the edit is in another slot
    assert read.measured == {}
    written.write_text(text.replace("{kind: stronghold}", "{kind: stronghold, trigger: end_of_step}"))
    assert load_config(written).plan == {}
    written.write_text(text.replace("micro_batch: 4", "micro_batch: 2"))
    assert load_config(written).plan == {}


def test_settings_alone_need_no_evidence(tmp_path: Path):
    save(load_config({"settings": SETTINGS}), tmp_path / "c.yaml")
    assert [each.name for each in tmp_path.iterdir()] == ["c.yaml"]
    assert load_config(tmp_path / "c.yaml").settings.dump() == SETTINGS
