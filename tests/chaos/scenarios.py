"""Faults by number: the promise for each and the tests that hold it; `python tests/chaos/scenarios.py` writes
docs/reliability.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RANKS, LOCAL, RAY = (
    "executors/test_rank_group.py",
    "executors/test_local.py",
    "executors/ray/test_executor.py",
)
RESUME, STORE, STUDY = (f"autotune/search/test_study{each}.py" for each in ("_resume", "_store", ""))
EVENTS, VERDICT = (f"autotune/search/test_{each}.py" for each in ("search_events", "trial_verdict"))
LAST, TENSORS, OFFLOAD = (f"ssd/test_{each}.py" for each in ("last_step", "ssd_tensors", "offload_dir"))
CONFIG, CHECKPOINT = "config/test_tuned_config.py", "checkpointer/test_checked_storage.py"
PREFLIGHT, CLI = "executors/test_preflight.py", "cli/test_cli.py"
FAULTS, FLIPS, FILES, KILLS = (
    f"chaos/test_{each}.py" for each in ("storage_faults", "flipped_bytes", "mutated_files", "kills")
)


class Scenario(NamedTuple):
    """One fault; `tests` are (file below tests, test), or `untested` says why there is none."""

    number: int
    fault: str
    promise: str
    tests: tuple[tuple[str, str], ...] = ()
    untested: str = ""


def of(file: str, *tests: str) -> tuple[tuple[str, str], ...]:
    return tuple((file, f"test_{each}") for each in tests)


NEEDS_GPU = "needs a GPU"
SCENARIOS = (
    Scenario(
        1,
        "kill -9 of a rank in a trial",
        "the trial is repeated once in fresh processes; killed again, it is a crash and the search continues",
        of(RANKS, "rank_killed_from_outside_is_repeated_once", "rank_killed_twice_is_a_crash"),
    ),
    Scenario(
        2,
        "kill -9 of a supervisor",
        "the trial's processes end with it, daemons too",
        of(RANKS, "killed_supervisor_ends_all_ranks", "killed_supervisor_leaves_no_daemon"),
    ),
    Scenario(
        3,
        "kill -9 of the driver, of the fork server's import too",
        "no process survives, every told trial is kept, a resume repeats only running ones",
        of(LOCAL, "local_processes_end_with_killed_driver")
        + of(RESUME, "kill_loses_only_running_trials")
        + of("executors/test_fork_server.py", "fork_server_ends_with_its_driver_while_it_imports")
        + of(KILLS, "killed_searches_lose_no_told_trial", "killed_processes_of_trials_leave_nothing"),
    ),
    Scenario(
        4,
        "crash at each durable act",
        "training resumes from its last complete step, to the bit",
        of(LAST, "resume_after_kill_at_every_durable_act", "resume_after_kill_is_bitwise")
        + of(KILLS, "killed_trainings_resume_bitwise"),
    ),
    Scenario(
        5,
        "torn last line of the event log",
        "it is truncated; nothing else is lost",
        of(EVENTS, "event_log_truncated_in_last_record_loses_only_that_record"),
    ),
    Scenario(
        6,
        "damaged study",
        "it is set aside and rebuilt from the event log, with the same numbers",
        of(RESUME, "resume_rebuilds_damaged_study_from_log", "resume_rebuilds_study_that_differs_from_log")
        + of(FLIPS, "flipped_bytes_of_a_study_are_noticed"),
    ),
    Scenario(
        7,
        "full disk in the study's folder",
        "one error; finished trials are kept",
        of("autotune/space/test_sampler.py", "sampler_on_full_disk_raises_and_keeps_results")
        + of(FAULTS, "writers_survive_each_failing_call"),
    ),
    Scenario(
        8,
        "full disk in the offload directory",
        "space is reserved first; the error names the tensor, the bytes and the directory",
        of(TENSORS, "full_drive_raises_before_any_write", "small_drive_raises_when_full"),
    ),
    Scenario(
        9,
        "short writes, input/output errors",
        "each writer completes or raises",
        of(FAULTS, "writers_survive_each_failing_call"),
    ),
    Scenario(
        10,
        "flipped bit in an offloaded block or a checkpoint",
        "a checksum finds it before the tensor is used; one that happens between two steps after user code"
        " has read the weight is found at its next load, not by further reads of that code",
        of(TENSORS, "checksum_finds_every_flipped_bit")
        + of(FLIPS, "flipped_bytes_of_a_checkpoint_are_noticed"),
    ),
    Scenario(
        11,
        "offload file truncated or deleted",
        "truncated: an error with the tensor; deleted: no harm",
        of(TENSORS, "truncated_file_raises_and_deleted_file_works"),
    ),
    Scenario(
        12,
        "files of dead runs",
        "`memtune clean` and the next run remove them, of temporary files as well",
        of(OFFLOAD, "clean_removes_dead_runs_only")
        + of(CLI, "clean_removes_temporary_files_of_dead_runs")
        + of(LOCAL, "local_executor_leaves_no_temporary_files"),
    ),
    Scenario(
        13,
        "links, other users, impossible names for the offload directory",
        "refused; no config names a path",
        of(OFFLOAD, "checked_refuses_impossible_names", "directory_of_another_user_is_refused")
        + of("test_security.py", "planted_links_are_not_followed"),
    ),
    Scenario(
        14,
        "device out of memory",
        "a result, not an error",
        of(RANKS, "oom_on_one_rank_is_the_result") + of(CLI, "trial_out_of_memory_exits_1"),
    ),
    Scenario(
        15,
        "host out of memory",
        "named as the cause, not repeated",
        of(
            "executors/test_merge_results.py",
            "sigkill_while_the_host_has_no_memory_is_reported_as_that",
            "failure_of_end_by_exit_code_and_signal",
        )
        + of(PREFLIGHT, "probe_reports_killed_child_as_out_of_memory"),
    ),
    Scenario(
        16,
        "pinned memory refused",
        "pageable memory, with one warning",
        of("runtime/test_transfer_pinned_memory.py", "page_locked_falls_back_to_pageable_memory"),
    ),
    Scenario(
        17,
        "hang in the user's code",
        "ended at its deadline or after silence, with stacks",
        of(RANKS, "hang_ends_at_deadline_with_stacks", "stopped_process_is_ended"),
    ),
    Scenario(
        18,
        "hung collective",
        "ended for all ranks; the one that stopped first is named",
        of(RANKS, "silence_is_a_hang_and_names_first_silent_rank"),
    ),
    Scenario(
        19,
        "one rank raises, others wait",
        "its error is the error",
        of(RANKS, "first_failed_rank_is_reported_and_ends_others"),
    ),
    Scenario(
        20,
        "daemons and sessions of a trial",
        "killed and reported",
        of(RANKS, "leftover_daemon_is_killed_and_reported"),
    ),
    Scenario(21, "GPU memory held after a trial", "every trial has processes of its own", untested=NEEDS_GPU),
    Scenario(
        22,
        "Ctrl-C",
        "best config so far, exit 130",
        of(RESUME, "ctrl_c_writes_best_so_far", "real_ctrl_c_ends_search_cleanly"),
    ),
    Scenario(
        23,
        "Ctrl-C again",
        "the study stays valid and can be resumed",
        of(
            RESUME,
            "second_ctrl_c_ends_at_once_and_leaves_a_study_to_resume",
            "resume_continues_interrupted_search_to_same_result",
        ),
    ),
    Scenario(
        24,
        "SIGTERM, SIGHUP",
        "as Ctrl-C; the terminal is restored",
        of(RESUME, "first_signal_ends_in_order_and_any_other_at_once")
        + of("autotune/ui/test_tui.py", "signals_stop_search_and_restore_terminal"),
    ),
    Scenario(
        25,
        "two searches on one study",
        "the second is refused with pid, host and time",
        of(RESUME, "resume_refuses_study_in_use") + of(STORE, "study_lock_reports_pid_and_time"),
    ),
    Scenario(
        26,
        "lock holder killed",
        "the kernel releases the lock",
        of(STORE, "study_lock_is_released_by_killed_process"),
    ),
    Scenario(
        27,
        "study or offload directory on a network mount",
        "the study: a warning; offloaded tensors: refused",
        of("chaos/test_environment.py", "study_on_a_network_mount_is_named")
        + of(STUDY, "search_warns_of_a_study_on_a_network_mount")
        + of(OFFLOAD, "dead_network_mount_is_refused_without_access"),
    ),
    Scenario(
        28,
        "resume with another model, import, budget, drive or version",
        "refused with the differences",
        of(RESUME, "resume_refuses_changed_budget", "resume_refuses_changed_imports")
        + of(STORE, "study_store_names_changed_field_on_resume"),
    ),
    Scenario(
        29,
        "resume of a finished study",
        "prints its result",
        of(RESUME, "resume_of_finished_study_prints_result")
        + of(STORE, "study_store_allows_repeated_resume"),
    ),
    Scenario(
        30,
        "model.py that cannot be imported",
        "found before any trial, with line and fix",
        of(PREFLIGHT, "probe_message_of_each_bad_file"),
    ),
    Scenario(
        31,
        "model.py that trains, exits or daemonizes on import",
        "ended at a deadline that counts its own time",
        of(PREFLIGHT, "probe_ends_training_on_import_at_deadline", "probe_kills_grandchildren")
        + of("chaos/test_environment.py", "time_without_a_core_is_not_counted"),
    ),
    Scenario(
        32,
        "loss is NaN or diverges",
        "reported; a trial whose losses differ is invalid",
        of(STUDY, "search_reports_nan_loss", "search_invalidates_trial_with_different_losses"),
    ),
    Scenario(
        33,
        "a setting changes results",
        "gradients and losses are compared with the plain model's",
        of("autotune/search/test_numerics_check.py", "numerics_check_compares_gradients_of_real_trials")
        + of("combinations/test_pairs.py", "pair_trains_as_the_plain_model_does"),
    ),
    Scenario(
        34,
        "malformed config",
        "one error with line and nearest name",
        of(CONFIG, "invalid_config_raises_with_its_line", "mutated_yaml_loads_or_raises_config_error")
        + of(FILES, "mutated_configs_load_or_raise_one_error"),
    ),
    Scenario(
        35,
        "hostile YAML",
        "no tags, no aliases, limits on size and depth",
        of(CONFIG, "parse_refuses_hostile_yaml"),
    ),
    Scenario(
        36,
        "hostile snapshot or checkpoint",
        "runs no code, one error",
        of("test_safe_pickle.py", "load_refuses_code_by_name")
        + of(CHECKPOINT, "load_runs_no_code")
        + of(
            FILES, "mutated_snapshots_load_or_raise_one_error", "mutated_checkpoints_load_or_raise_one_error"
        ),
    ),
    Scenario(
        37,
        "open ports",
        "ranks listen on loopback; Ray needs a token",
        of(RANKS, "ranks_listen_on_loopback_only") + of(RAY, "ray_cluster_requires_token"),
    ),
    Scenario(
        38,
        "foreign Ray cluster in the environment",
        "not joined unasked",
        of(RAY, "ray_processes_end_with_killed_driver_and_no_foreign_cluster_is_joined"),
    ),
    Scenario(
        39,
        "secrets in the environment",
        "masked in what is stored and shown; studies are private",
        of("executors/test_secret_values.py", "log_tail_of_a_trial_has_no_secret")
        + of(RESUME, "study_is_readable_by_its_user_only"),
    ),
    Scenario(
        40,
        "HTML in names",
        "the report escapes all text of a study and loads nothing",
        of("autotune/report/test_page.py", "page_escapes_text_of_the_study")
        + of("autotune/report/test_page.py", "page_is_complete_offline_small_and_well_formed"),
    ),
    Scenario(
        41,
        "GPU shared with another job",
        "a trial that lacks memory is out of memory; the other job is not named",
        untested=NEEDS_GPU,
    ),
    Scenario(
        42,
        "GPU lost",
        "one message with the driver's error; the state on the host remains, and the trial is a crash",
        of("device/test_faults.py", "errors_of_the_driver_mean_a_lost_device", "lost_device_is_one_message")
        + of("device/test_bad_input.py", "device_lost_in_a_step_leaves_the_state_on_the_host"),
    ),
    Scenario(
        43,
        "clock jump",
        "durations are of the monotonic clock",
        of("chaos/test_environment.py", "clock_jump_changes_no_duration"),
    ),
    Scenario(
        44,
        "nothing fits",
        "the closest setting, the missing bytes and remedies, exit 1",
        of(STUDY, "search_without_fit_reports_closest_and_remedies"),
    ),
    Scenario(
        45,
        "files of another version",
        "logs with newer events are read; configs of a newer schema are refused",
        of(EVENTS, "event_log_reader_tolerates_newer_kinds_and_fields")
        + of(CONFIG, "invalid_config_raises_with_its_line"),
    ),
    Scenario(
        46,
        "apply fails half-way",
        "model and optimizer are as before; a second apply is refused",
        of("chaos/test_apply_errors.py", "error_at_any_call_of_apply_leaves_all_as_before")
        + of("parallel/sharding/test_fsdp_sharding.py", "fsdp_failed_apply_restores_model")
        + of("test_api.py", "second_apply_raises"),
    ),
    Scenario(
        47,
        "config for another machine",
        "plans are refused, settings warn",
        of(CONFIG, "check_machine_refuses_plans_and_warns_for_settings", "config_for_other_ranks_raises"),
    ),
    Scenario(
        48,
        "output exists or cannot be written",
        "found at the start; replaced only with --force, atomically",
        of(STUDY, "search_refuses_existing_output_before_trials")
        + of(CLI, "cli_error_prints_one_message_and_its_exit_code")
        + of(CONFIG, "failed_save_keeps_the_old_file"),
    ),
    Scenario(
        49,
        "checkpoint loaded without memtune, and the reverse",
        "keys, shapes and values of the plain model",
        of(
            "checkpointer/test_distributed.py",
            "checkpoint_loads_without_memtune",
            "load_reads_checkpoints_of_plain_scripts",
        ),
    ),
    Scenario(
        50,
        "shared memory full",
        "the one file there, the link's token, is refused with a fix, and no part of it remains",
        of("offload/parameters/test_link_token.py", "token_on_full_shared_memory_is_refused_without_a_rest"),
    ),
    Scenario(
        51,
        "noise, throttling, other load",
        "drift is reported; within the spread the simpler setting wins",
        of(STUDY, "search_reports_drift_of_machine") + of(VERDICT, "verdict_within_spread_prefers_simpler"),
    ),
    Scenario(
        52,
        "a technique that crashes",
        "it is dropped, the search continues; equal crashes stop it",
        of(
            STUDY,
            "search_drops_technique_that_crashes_twice",
            "search_drops_technique_that_refuses_live_model_twice",
            "search_stops_after_same_crash_five_times",
        ),
    ),
)


def page() -> str:
    """Return docs/reliability.md."""
    lines = [
        "# Reliability",
        "",
        "Faults, the promise for each, and its tests. `make test-chaos` runs `tests/chaos/` with",
        "a hundred times the cases of `make test`, kills `KILLS` trainings of each kind, searches and",
        "processes (`make test-chaos KILLS=1000`), runs `TRIALS` trials of a tiny model in one driver,",
        "and prints the counts; another `SEED` draws other cases. The other tests run with `make test`",
        "or `make test-slow`.",
        "`python tests/chaos/scenarios.py` writes this page.",
        "",
        "| # | fault | promise | tests |",
        "|---|---|---|---|",
    ]
    for each in SCENARIOS:
        named = "<br>".join(f"[{test}](../tests/{file})" for file, test in each.tests)
        lines.append(
            f"| {each.number} | {each.fault} | {each.promise} | {named or f'none: {each.untested}'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
