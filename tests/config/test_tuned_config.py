from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from memtune.api import apply
from memtune.config.apply_checks import check_environment, check_machine, check_made_for, fingerprint
from memtune.config.tuned_config import MadeFor, Settings, TunedConfig, dump_yaml, load_config, save
from memtune.config.yaml_io import MAX_BYTES, flow, parse, save_text
from memtune.device import accelerator
from memtune.errors import ApplyError, ConfigError, EnvironmentFault
from memtune.program.op_addresses import OpAddresses
from memtune.search_spaces import SLOTS, null
from memtune.search_spaces.allocator.expandable_segments import ExpandableSegments
from memtune.search_spaces.allocator.native import Native
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.states.stronghold import StrongholdPlan
from memtune.search_spaces.recompute._block_planner.call_selection import CallsPlan
from memtune.technique import Plan

WHOLE = """\
memtune: 1
settings:
  execution: {micro_batch: 8, accumulate: 4, order: {kind: program}, compile: false}
  recompute: {kind: none}
  split:     {kind: none}
  sharding:
    states:        {kind: none}
    communication: {kind: plain}
    parallel:      {kind: none}
  offload:
    states:        {kind: stronghold}
    activations:   {kind: none}
  allocator: {kind: native, max_split_size_mb: 128, garbage_collection_threshold: 0.8}
measured: {step_s: 1e-3, peak_allocated_bytes: 123456}
predicted: {step_s: 0.5}
certificate: {confirmed: true}
made_for: {model: "sha256:ab", parameters: 7, blocks: ["h.{0..3}"], ranks: 2, device: cpu, torch: 2.13.0}
plan:
  offload.states: {slots: 2, deferred: [1]}
study: {name: gpt, trial: 3}
"""


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    return str(caught.value)


def test_load_config_reads_all_sections():
    config = load_config(WHOLE)
    assert config.settings.execution == Execution(micro_batch=8, accumulate=4)
    assert config.settings.technique("allocator") == Native(
        max_split_size_mb=128, garbage_collection_threshold=0.8
    )
    assert config.settings.technique("recompute") == null("recompute")
    assert config.measured["step_s"] == 0.001
    assert config.plan == {"offload.states": StrongholdPlan(slots=2, deferred=(1,))}
    assert config.made_for is not None
    assert config.made_for.torch == "2.13.0"


def test_buckets_read_back_equal_and_hold_smaller_batches(tmp_path: Path):
    config = load_config(
        """
settings: {recompute: {kind: full}, offload: {states: {kind: stronghold}}}
plan: {offload.states: {slots: 2}}
buckets:
- inputs: [[4, 8], []]
- {inputs: [[4, 16], []], settings: {recompute: {kind: every_nth, n: 3}}, predicted: {peak_bytes: 7}}
"""
    )
    small, middle = config.buckets
    assert load_config(dump_yaml(config)) == config
    assert load_config(save(config, tmp_path / "tuned.yaml")) == config
    assert small.holds([(4, 8), ()])
    assert small.holds([(3, 2), ()])
    assert not small.holds([(4, 9), ()])
    assert not small.holds([(4, 8)])
    assert not small.holds([(4, 8, 1), ()])
    assert config.in_bucket(small).settings.chosen.keys() == {"offload.states"}
    followed = config.in_bucket(middle)
    assert followed.settings.technique("recompute").kind == "every_nth"
    assert followed.plan == config.plan


@pytest.mark.parametrize(
    ("kind", "plan", "expected"),
    [
        (
            "stronghold",
            "{slots: 0}",
            "plan.offload.states.slots: expected greater than or equal to 1, but got 0.",
        ),
        ("stronghold", "{slots: 2, wide: 1}", "plan.offload.states.wide: "),
        ("stronghold", "{slots: '2'}", 'plan.offload.states.slots: expected a valid integer, but got "2".'),
        ("patrickstar", "{slots: [2]}", "plan.offload.states.chunk_bytes: Field required"),
        ("harmony", "{forward: [], backward: [[1, 2]], swapped_bytes: 0}", "do not follow one another"),
        ("none", "{slots: 2}", "offload.states: {kind: none} plans nothing"),
    ],
)
def test_malformed_plan_raises_with_slot_field_and_value(kind: str, plan: str, expected: str):
    text = message(f"settings: {{offload: {{states: {{kind: {kind}}}}}}}\nplan:\n  offload.states: {plan}\n")
    assert text.startswith("MT316 ")
    assert ":3" in text.splitlines()[0]
    assert expected in text
    assert "Fix: " in text


def test_plan_type_is_that_with_most_fields():
    ranks = {"spans": [[0, 1], [1, 2]], "ranks": [0, 1], "first": [], "last": [], "moved_bytes": 0}
    one = {"forward": [[0, 1]], "backward": [[0, 1], [1, 2]], "swapped_bytes": 3}
    for plan in (ranks, one):
        found = load_config(
            {"settings": {"offload": {"states": {"kind": "harmony"}}}, "plan": {"offload.states": plan}}
        ).plan
        assert found["offload.states"].document() == plan


def test_omitted_slots_hold_the_null_technique():
    chosen = load_config("settings: {execution: {}}\n").settings
    assert [chosen.technique(slot) for slot in SLOTS] == [null(slot) for slot in SLOTS]
    assert chosen.execution == Execution()


def test_dump_is_short_and_reads_back_equal():
    config = load_config(WHOLE)
    text = dump_yaml(config)
    assert load_config(text) == config
    assert "none" not in text
    assert "#" in text


def test_config_prints_as_its_file_without_evidence():
    config = load_config(WHOLE)
    text = str(config)
    assert text == repr(config)
    assert load_config(text).settings == config.settings
    assert "deferred" not in text
    assert "evidence" not in text
    assert len(text.splitlines()) < 25


def test_load_config_reads_json():
    config = load_config(WHOLE)
    assert load_config(json.dumps(config.document())) == config
    assert load_config(config.document()) == config


def test_settings_drop_null_techniques():
    chosen = Settings.of(Execution(), {"allocator": ExpandableSegments(), "recompute": null("recompute")})
    assert chosen.dump()["allocator"] == {"kind": "expandable_segments"}
    assert "recompute" not in chosen.dump()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("settings: {recompte: {kind: none}}\n", 1, "Did you mean 'recompute'"),
        ("settings:\n  offload:\n    activation: {kind: none}\n", 3, "Did you mean 'activations'"),
        ("settings:\n  execution:\n    microbatch: 3\n", 3, "Did you mean 'micro_batch'"),
        ("settings:\n  recompute:\n    kind: nonne\n", 3, "Did you mean 'none'"),
        (
            "settings:\n  allocator:\n    kind: native\n    max_split_size: 3\n",
            4,
            "Did you mean 'max_split_size_mb'",
        ),
        ("settings:\n  allocator:\n    kind: native\n    max_split_size_mb: '128'\n", 4, "valid integer"),
        ("settings:\n  allocator:\n    kind: native\n    roundup_power2_divisions: 3\n", 4, "powers of two"),
        ("settings:\n  execution: {micro_batch: 0}\n", 2, "greater than or equal to 1"),
        ("settings:\n  execution: {micro_batch: 2000000}\n", 2, "less than or equal to 1048576"),
        ("settings:\n  execution: {accumulate: 2000000}\n", 2, "less than or equal to 1048576"),
        (f"settings:\n  execution: {{micro_batch: 0x{'f' * 6000}}}\n", 2, "a number of this length"),
        (f"settings:\n  execution: {{micro_batch: {'9' * 6000}}}\n", 2, "a number of this length"),
        ("settings:\n  execution: {compile: 1}\n", 2, "'blocks' or 'model'"),
        ("settings:\n  execution: {compile_backend: aot_eager}\n", 2, "set compile to blocks or model"),
        ("settings:\n  recompute: 3\n", 2, "mapping"),
        ("settings: {}\nsetings: {}\n", 2, "Did you mean 'settings'"),
        (
            "settings:\n  allocator:\n    - {kind: gmlake}\n    - {kind: planned_layout}\n",
            3,
            "One technique stands there",
        ),
        (
            "settings:\n  allocator: {kind: [gmlake, planned_layout]}\n",
            2,
            "kind is the name of one technique",
        ),
        ("settings:\n  allocator: {kind: gmlake}\n  allocator: {kind: async}\n", 3, "keep one of them"),
        ("settings: {}\nplan: {recomputed: {}}\n", 2, "Did you mean 'recompute'"),
        ("settings: {}\nmade_for: {rank: 2}\n", 2, "Did you mean 'ranks'"),
        ("settings: {}\nmeasured: [1]\n", 2, "measured"),
        ("settings: {}\nmemtune: 2\nnew_part: {}\n", 2, "schema 2"),
        ("settings: {}\nmemtune: one\n", 2, "schema"),
        ("settings: {}\nbuckets: {inputs: []}\n", 2, "buckets is a list"),
        ("settings: {}\nbuckets:\n- [1]\n", 3, "a bucket is a mapping"),
        ("settings: {}\nbuckets:\n- {input: [[1]]}\n", 3, "Did you mean 'inputs'"),
        ("settings: {}\nbuckets:\n- settings: {}\n", 3, "inputs: Field required"),
        ("settings: {}\nbuckets:\n- inputs:\n  - [4, '8']\n", 4, "expected a valid integer"),
        (
            "settings: {}\nbuckets:\n- inputs: [[1]]\n  settings:\n    allocator: {kind: gmlake}\n",
            5,
            "allocator cannot differ between buckets",
        ),
        (
            "settings: {}\nbuckets:\n- inputs: [[1]]\n  plan: {recompute: {a: 1}}\n",
            4,
            "recompute: {kind: none} plans nothing",
        ),
        ("- a\n- b\n", 1, "mapping"),
        (
            "memtune: 1\nsettings:\n  allocator: {kind: native, roundup_power2_divisions: true}",
            3,
            "settings.allocator.roundup_power2_divisions: expected a valid integer, but got true",
        ),
    ],
)
def test_invalid_config_raises_with_its_line(text: str, line: int, words: str):
    shown = message(text)
    assert f":{line}  " in shown
    assert words in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1]\nb: 1\n", "anchor"),
        ("a: *x\n", "alias"),
        ("a: &a [x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n", "anchor"),
        ("a: !!python/object/apply:os.system ['true']\n", "tag"),
        ("a: !!str 1\n", "tag"),
        ("!!map {a: 1}\n", "tag"),
        ("a: ! x\n", "tag"),
        ("a: 1\nb: 2\na: 2\n", "the key 'a', given on line 1"),
        ("? [1]\n: 2\n", "as a key"),
        ("a: 1\n---\nb: 2\n", "second document"),
        ("[" * 21 + "]" * 21 + "\n", "nesting"),
        ("{a: " * 30 + "\n", "nesting"),
        ("[" * 100_000 + "\n", "nesting"),
        ("a: b: c\n", "not YAML"),
        ("\x00\n", "not YAML"),
        ('a: "\\U99999999"\n', "not YAML"),
        ("\ud800\n", "not YAML"),
        ("a: " + "9" * 10_000 + "\n", "number of this length"),
        ("a: " + "x" * MAX_BYTES + "\n", "larger than 1 MiB"),
        ("a: [1\n", "not YAML"),
        ("\t- a\n", "not YAML"),
        ("{", "not YAML"),
    ],
    ids=range(22),
)
def test_parse_refuses_hostile_yaml(text: str, words: str):
    with pytest.raises(ConfigError, match=r"^MT205 config") as caught:
        parse(text)
    assert words in caught.value.what


def test_parse_reads_twenty_levels():
    assert parse("[" * 20 + "]" * 20).data


def test_scalars_follow_yaml_1_2():
    read = parse("{a: no, b: 1e-3, c: 0o17, d: ~, e: 'true', f: -.inf, g: 1_000, h: 12:30, i: True}").data
    assert read == {
        "a": "no",
        "b": 0.001,
        "c": 15,
        "d": None,
        "e": "true",
        "f": -float("inf"),
        "g": "1_000",
        "h": "12:30",
        "i": True,
    }


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "Null",
        "NO",
        "",
        "~",
        "1",
        "1e3",
        ".inf",
        "- a",
        "a: b",
        "a #b",
        " a",
        "é",
        "\x85",
        "\U0001f600",
    ],
)
def test_flow_quotes_text_that_reads_as_another_type(text: str):
    assert parse(flow({text: text})).data == {text: text}


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(PLAIN)
def test_flow_round_trips_plain_data(value: object):
    assert parse(f"value: {flow(value)}\n").data == {"value": value}


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = WHOLE
    words = [
        "&a ",
        "*a",
        "!x ",
        "{",
        "}",
        "[",
        "]",
        ": ",
        "- ",
        "\n",
        "  ",
        '"',
        "'",
        "#",
        "|",
        ">",
        "%",
        "@",
        "null",
        "9" * 20,
        ".nan",
        "kind",
        "none",
        "native",
        "\t",
        "\\u0000",
        "---\n",
        "? ",
        "<<: ",
        "é",
        "\x85",
        "\ufeff",
    ]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 12)))
        insert = draw(st.sampled_from([*words, ""]) | st.text(max_size=3))
        text = text[:start] + insert + text[stop:]
    return text


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_mutated_yaml_loads_or_raises_config_error(text: str):
    try:
        config = load_config(text + "\n")
    except ConfigError:
        return
    assert dump_yaml(load_config(dump_yaml(config))) == dump_yaml(config)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["settings", "plan", "made_for", "memtune", "measured"]), PLAIN))
def test_plain_data_loads_or_raises_config_error(data: dict[str, object]):
    try:
        load_config(data)
    except ConfigError:
        pass


def test_load_config_refuses_other_than_plain_data():
    with pytest.raises(ConfigError, match="not plain data"):
        load_config({"settings": {"recompute": object()}})


def test_missing_file_error_names_similar_files(tmp_path: Path):
    (tmp_path / "tuned.yaml").write_text(WHOLE)
    with pytest.raises(ConfigError, match=r"no file .*tund\.yaml") as caught:
        load_config(tmp_path / "tund.yaml")
    assert "tuned.yaml" in caught.value.evidence
    with pytest.raises(ConfigError, match="folder"):
        load_config(tmp_path)
    (tmp_path / "model.py").touch()
    with pytest.raises(ConfigError, match="Python file, not a config"):
        load_config(tmp_path / "model.py")


def test_save_replaces_the_file_and_leaves_no_others(tmp_path: Path):
    config, out = load_config(WHOLE), tmp_path / "tuned.yaml"
    out.write_text("old")
    link = tmp_path / "link.yaml"
    link.symlink_to(out)
    save(config, link)
    assert link.is_symlink()
    assert load_config(out) == config
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "link.yaml",
        "tuned.evidence.json",
        "tuned.yaml",
    ]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "tuned.yaml"
    out.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        save(load_config(WHOLE), out)
    assert out.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.yaml"]


def test_save_removes_what_a_killed_writer_left_but_not_what_a_living_one_writes(tmp_path: Path):
    out = tmp_path / "tuned.yaml"
    names = [f".tuned.yaml.{number}.tmp" for number in ("0123abcd", "89abcdef")]
    killed, living = (tmp_path / name for name in names)
    killed.write_text("half")
    with living.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save_text(out, "new")
        assert sorted(each.name for each in tmp_path.iterdir()) == [names[1], "tuned.yaml"]
    save_text(out, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.yaml"]


def test_save_into_a_missing_folder_raises(tmp_path: Path):
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        save(load_config(WHOLE), tmp_path / "missing" / "tuned.yaml")


def test_config_for_another_model_raises():
    model, other = nn.Linear(3, 4), nn.Linear(3, 5)
    config = TunedConfig(made_for=MadeFor(model=fingerprint(model), parameters=16, ranks=1))
    check_made_for(config, model, 1)
    check_made_for(TunedConfig(), other, 8)
    with pytest.raises(ConfigError, match="another model") as caught:
        check_made_for(config, other, 1)
    assert "16 parameters" in caught.value.evidence
    assert "20 (sha256:" in caught.value.evidence
    with pytest.raises(ConfigError, match="another model"):
        check_made_for(config, model.to(torch.bfloat16), 1)


def test_config_for_other_ranks_raises():
    config = TunedConfig(made_for=MadeFor(ranks=2))
    with pytest.raises(ConfigError, match="2 ranks, here is 1") as caught:
        check_made_for(config, nn.Linear(1, 1), 1)
    assert caught.value.fix.endswith("search again with --device cpu --workers 1")
    with pytest.raises(ConfigError, match="1 rank, here are 8") as caught:
        check_made_for(TunedConfig(made_for=MadeFor(device="cuda")), nn.Linear(1, 1), 8)
    assert caught.value.fix.endswith("search again with --gpus 8")


HERE = MadeFor(torch="2.13.0+cpu", device="cuda", hardware="h100-80g")
PLANNED: dict[str, Plan] = {"recompute": CallsPlan(calls=(OpAddresses(),), blocks=(0,))}


@pytest.mark.parametrize(
    ("difference", "device", "hardware", "torch_version"),
    [
        ("torch: 2.13.0+cpu then, 2.11.0 now", "cuda", "h100-80g", "2.11.0"),
        ("hardware: h100-80g then, a10 now", "cuda", "a10", "2.13.0"),
        ("device: cuda then, cpu now", "cpu", "h100-80g", "2.13.0"),
    ],
)
def test_check_machine_refuses_plans_and_warns_for_settings(
    difference: str, device: str, hardware: str, torch_version: str
):
    with pytest.raises(ConfigError, match="plan of recompute") as caught:
        check_machine(TunedConfig(made_for=HERE, plan=PLANNED), device, hardware, torch_version)
    assert caught.value.evidence == f"{difference}."
    assert caught.value.code == "MT206"
    with pytest.warns(UserWarning, match=f"tuned on another machine .{re.escape(difference)}"):
        check_machine(TunedConfig(made_for=HERE), device, hardware, torch_version)


def test_check_machine_ignores_builds_of_torch():
    with warnings.catch_warnings(action="error"):
        check_machine(TunedConfig(made_for=HERE, plan=PLANNED), "cuda", "h100-80g", "2.13.1+cu129")
        check_machine(TunedConfig(plan=PLANNED), "cpu", "cpu", "2.11.0")


def test_apply_refuses_a_plan_made_with_another_torch():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters())
    config = TunedConfig(made_for=HERE.model_copy(update={"torch": "2.1.0", "device": "cpu"}), plan=PLANNED)
    with pytest.raises(ConfigError, match="made on another machine"):
        apply(model, optimizer, config)


EXPANDABLE = Settings.of(Execution(), {"allocator": ExpandableSegments()})


def test_environment_has_the_techniques_variables():
    assert Settings().env() == {}
    assert EXPANDABLE.env()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_missing_variable_error_has_the_export_line(monkeypatch: pytest.MonkeyPatch):
    wanted = EXPANDABLE.env()
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    check_environment(Settings())
    check_environment(EXPANDABLE, device="cpu")
    with pytest.raises(ApplyError) as caught:
        check_environment(EXPANDABLE)
    assert "export " + " ".join(f"{name}={value}" for name, value in wanted.items()) in str(caught.value)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    check_environment(EXPANDABLE)


def test_variable_set_after_cuda_started_raises(monkeypatch: pytest.MonkeyPatch):
    # torch's getter returns the settings that it read at its start; the test only pretends that CUDA runs.
    for name, value in EXPANDABLE.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(accelerator, "is_started", lambda: True)
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
        with pytest.raises(ApplyError, match="before the device starts"):
            check_environment(EXPANDABLE)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        check_environment(EXPANDABLE)
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_misplaced_axis_error_names_its_place() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'sharding'[\s\S]*Fix: settings: \{sharding: …\}"):
        load_config({"sharding": {"states": {"kind": "ddp"}}})


def test_sentences_are_those_of_the_chosen_techniques():
    settings = load_config(
        {
            "settings": {
                "execution": {"micro_batch": 2, "accumulate": 4, "compile": "blocks"},
                "offload": {"states": {"kind": "l2l"}},
                "recompute": {"kind": "full"},
            }
        }
    ).settings
    assert list(settings.sentences().items()) == [
        ("execution", "runs 4 micro-batches of 2 samples a step, compiles each block"),
        ("recompute", "recomputes every block in backward (Chen et al. 2016)"),
        (
            "offload.states",
            "keeps the blocks in host memory, with one block's weights at a time on the device (L2L)",
        ),
    ]
    assert settings.sentence.startswith("compiles each block; recomputes every block")
    assert load_config({"settings": {}}).settings.sentence == "changes nothing"


@pytest.mark.parametrize(
    ("execution", "exactness"),
    [
        (Execution(micro_batch=8), "bitwise"),
        (Execution(micro_batch=4, accumulate=2), "reordered"),
        (Execution(micro_batch=8, compile="blocks"), "reordered"),
    ],
)
def test_exactness_follows_accumulation_and_compile(execution: Execution, exactness: str) -> None:
    assert Settings.of(execution, {"recompute": null("recompute")}).exactness == exactness
