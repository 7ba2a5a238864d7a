"""What we promise, and the tests that check it: `make soak` runs one table, `make evidence` in CI the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guarantee:
    """A row of the table."""

    name: str
    part: str
    tested: str  # how it is tested, and how often
    tests: tuple[str, ...]  # a file name, which is unique below tests/, "::" and how the names of its tests begin
    alone: bool = False  # without parallel tests
    least: int = 1  # tests that must pass


GUARANTEES = (
    Guarantee(
        "kill -9 loses no saved work",
        "kills",
        "200 kills of whole runs at random times, each run then compared bit for bit with an uninterrupted one; "
        "250 kills of a process that only writes checkpoints",
        ("test_interruptions.py::test_killed_at_random", "test_checkpoint.py::test_a_kill_at_any_instant"),
    ),
    Guarantee(
        "resume is exact",
        "resume",
        "from every checkpoint of a 100-step run and of a 29-step run: two stages, dropout, packing, micro-batches",
        ("test_resume.py::test_resumed_from", "test_resume.py::test_optimizer_state"),
    ),
    Guarantee(
        "corruption is detected",
        "rot",
        "1,000 bit flips, every bit of the checksums, truncations, deleted, added and swapped files",
        (
            "test_checkpoint.py::test_every_flipped_bit",
            "test_checkpoint.py::test_every_bit_of_the_checksums",
            "test_checkpoint.py::test_every_truncation",
            "test_checkpoint.py::test_deleted_added_and_swapped",
            "test_checkpoint.py::test_whole_checkpoints_under",
            "test_checkpoint.py::test_hostile_checksums",
            "test_resume.py::test_damaged_checkpoint",
        ),
    ),
    Guarantee(
        "power loss",
        "rot",
        "recorded operations replayed with a crash after each, unsynced data dropped",
        ("test_storage.py::test_power_loss",),
    ),
    Guarantee(
        "full or failing disk",
        "disk",
        "ENOSPC, EIO and read-only errors at every call; a whole run with a full disk at a checkpoint",
        (
            "test_storage.py::test_a_disk_that_fails",
            "test_storage.py::test_a_file_that_cannot_be_written",
            "test_storage.py::test_an_interrupted_remote_write_or_removal",
            "test_checkpoint.py::test_a_failed_save",
            "test_faults.py::test_full_disk",
            "test_best_checkpoint.py::test_a_full_disk",
            "test_faults.py::test_run_without_its_last",
        ),
    ),
    Guarantee(
        "signals",
        "signals",
        "while training and compiling; 40 during evaluation and saving, half of them twice; exit within 10 s",
        ("test_interruptions.py::test_stop_signal", "test_interruptions.py::test_signals_during"),
    ),
    Guarantee(
        "closed terminal",
        "signals",
        "standard output closed during a run; SIGHUP is one of the signals above",
        ("test_interruptions.py::test_run_continues", "test_checkpoint.py::test_a_listener_whose_terminal"),
    ),
    Guarantee(
        "NaN and Inf",
        "numbers",
        "in loss, gradient and update, for each optimizer; a whole run with an infinite weight",
        (
            "test_step.py::test_a_loss_that_is_not_finite",
            "test_step.py::test_a_gradient_that_is_not_finite",
            "test_step.py::test_an_update_that_is_not_finite",
            "test_faults.py::test_batch_with_a_non_finite_loss",
        ),
    ),
    Guarantee(
        "one bad batch",
        "numbers",
        "a batch of garbage among clean ones; 10 clean seeds, 1,400 simulated runs of 6,000 steps",
        (
            "test_promises.py::test_a_poisonous_batch",
            "test_promises.py::test_clean_runs",
            "test_divergence.py::test_a_healthy_run",
            "test_divergence.py::test_a_diverged_run",
        ),
    ),
    Guarantee(
        "every row once per epoch",
        "data",
        "1, 3 and 8 processes, shuffled, packed or not, resumed; text split into documents",
        (
            "test_data.py::test_every_epoch_has",
            "test_data.py::test_processes_together",
            "test_data.py::test_packing_has_each_document",
            "test_data.py::test_unpacked_documents",
            "test_data.py::test_split_text",
        ),
    ),
    Guarantee("R11 device counts change", "devices", "1, 8, 1 devices", ("test_resume.py::test_devices_may_change",)),
    Guarantee(
        "bad rows",
        "data",
        "10,000 fuzzed rows, 10,000 mutated rows of every format, mutated files of every kind",
        (
            "test_data_prepare.py::test_ten_thousand_fuzzed_rows",
            "test_data_prepare.py::test_bad_row_stops",
            "test_data_formats.py::test_ten_thousand_mutated_rows",
            "test_data_sources.py::test_mutated_files",
            "test_data_sources.py::test_corrupt_parquet",
            "test_hostile_data.py::",
        ),
    ),
    Guarantee(
        "real data",
        "real data",
        "public data sets, downloaded; every count of the summary adds up",
        ("test_real_data.py::",),
    ),
    Guarantee(
        "every trained document has supervised tokens",
        "data",
        "rows without an answer within the sequence length, rows too long, rows shortened: refused or counted",
        (
            "test_data.py::test_documents_without_trained_tokens",
            "test_data_prepare.py::test_rows_whose_answer",
            "test_data_prepare.py::test_rows_too_long",
            "test_data_prepare.py::test_truncation_shortens",
            "test_data_report.py::test_rows_too_long_are_counted",
            "test_data_report.py::test_nothing_left_to_train",
            "test_data_report.py::test_shortened_rows",
        ),
    ),
    Guarantee(
        "the mask is correct",
        "masks",
        "10,000 random conversations over all template families and real tokenizers, against the tokenizer's own "
        "rendering",
        (
            "test_data_render.py::test_rendering_equals",
            "test_data_render.py::test_stop_token_is_trained",
            "test_data_render.py::test_marked_template",
            "test_data_render.py::test_questions_and_tool_results",
            "test_data_real_tokenizers.py::test_rendering_equals",
        ),
    ),
    Guarantee(
        "the saved adapter is correct",
        "adapter",
        "loaded by PEFT for every architecture of the tests, and in a process without Trillora",
        (
            "test_adapters.py::test_peft_loads_our_adapter",
            "test_trainer.py::test_adapter_loads_in_peft",
            "test_evaluate.py::test_the_adapter_is_the_adapter",
        ),
    ),
    Guarantee(
        "long runs",
        "long",
        "10,000 steps, 100 checkpoints in one process",
        ("test_promises.py::test_a_long_run",),
        alone=True,
    ),
    Guarantee(
        "polite install",
        "install",
        "pip on the complete package lists of Colab's TPU and GPU images: nothing they have is changed",
        ("test_install.py::",),
    ),
    Guarantee(
        "one owner",
        "owner",
        "a second process is refused, the lock of a dead process is taken over, many processes at once; two runs with "
        "the same checkpoint folder or URL",
        ("test_run_lock.py::", "test_checkpoint_owner.py::", "test_interruptions.py::test_second_process"),
    ),
    Guarantee(
        "no pickle",
        "safety",
        "every unpickling during train, eval, generate, inspect, report and doctor; pickled models",
        (
            "test_promises.py::test_no_file_is_unpickled",
            "test_promises.py::test_the_audit_sees",
            "test_promises.py::test_pickled_weights",
            "test_source.py::test_folder_without_usable_weights",
        ),
    ),
    Guarantee(
        "no remote code",
        "safety",
        "malicious model and tokenizer folders with auto_map",
        ("test_source.py::test_code_in_a", "test_source.py::test_model_that_transformers_supports"),
    ),
    Guarantee(
        "archives",
        "safety",
        "parent paths, absolute paths, links, devices, bombs, too many members, false headers",
        (
            "test_data_sources.py::test_hostile_tar",
            "test_data_sources.py::test_hostile_zip",
            "test_data_sources.py::test_an_archive_with_too_many",
            "test_data_sources.py::test_a_tar_header",
            "test_data_sources.py::test_compression_bombs",
            "test_data_sources.py::test_members_after_a_bomb",
            "test_data_sources.py::test_many_small_bombs",
        ),
    ),
    Guarantee(
        "control tokens",
        "masks",
        "every control token in every text field of 10,000 hostile conversations, over all template families and real "
        "tokenizers with their own flags",
        (
            "test_control_tokens.py::",
            "test_data_render.py::test_control_tokens_planted",
            "test_data_real_tokenizers.py::test_control_tokens_planted",
            "test_prompts.py::test_control_tokens",
        ),
    ),
    Guarantee(
        "hostile templates",
        "templates",
        "endless loops, gigabytes, recursion, escapes from the sandbox, mutated templates",
        ("test_hostile_templates.py::", "test_data_worker.py::test_hostile_template", "test_data_worker.py::test_row"),
    ),
    Guarantee(
        "secrets",
        "safety",
        "canary values in the environment, the recipe and the command line",
        (
            "test_promises.py::test_no_secret_is_printed",
            "test_promises.py::test_no_error_repeats",
            "test_run_report.py::test_no_secret_reaches",
            "test_storage.py::test_secrets_of_a_url",
        ),
    ),
    Guarantee(
        "report pages",
        "safety",
        "markup in every field, in a real browser if one is installed",
        (
            "test_run_report.py::test_markup_in_every_field",
            "test_run_report.py::test_a_browser_shows",
            "test_run_report.py::test_a_hostile_run",
            "test_data_report.py::test_data_on_the_page",
        ),
    ),
    Guarantee(
        "names",
        "safety",
        "malicious names of runs, data and 10,000 stages; all writes of a run are observed",
        (
            "test_promises.py::test_strange_names",
            "test_promises.py::test_no_stage_is_named",
            "test_storage.py::test_no_name_leads_out",
            "test_storage.py::test_a_link_in_place",
        ),
    ),
    Guarantee(
        "changed inputs are refused",
        "resume",
        "recipe, data, model or tokenizer changed between two starts",
        ("test_resume.py::test_changed_inputs", "test_resume.py::test_changes_are_accepted", "test_token_cache.py::"),
    ),
    Guarantee(
        "dependencies",
        "install",
        "the lock files have every requirement with its hashes, and are what the tests run with; the linter's security "
        "rules are part of `make lint`",
        ("test_locks.py::",),
    ),
    Guarantee(
        "hostile files and commands",
        "fuzz",
        "10,000 recipes, 10,000 changes of a model's description, 2,000 of checkpoints, adapters, 5,000 command lines",
        (
            "test_hostile_recipes.py::",
            "test_hostile_models.py::",
            "test_hostile_adapters.py::",
            "test_hostile_checkpoints.py::",
            "test_hostile_terminal.py::",
            "test_hostile_environment.py::",
            "test_isolation.py::",
        ),
    ),
    Guarantee(
        "changed folders",
        "mutations",
        "1,350 changes of runs, models, recipes, adapters and exports, each followed by a real command of 13 verbs "
        "with secrets in its environment; connections to other machines are recorded",
        ("test_mutations.py::",),
    ),
)


EVERY_CHANGE, RELEASE = "every change", "release"  # parts of the evidence
EVIDENCE = (
    Guarantee(
        "quickstart and recipes",
        EVERY_CHANGE,
        "whole runs of the real embedded model: every command of the first ten minutes, from a clone (the quickstart "
        "with its scores) and from the wheel alone; `--tiny` of four recipes, with fewer steps, on held-out rows",
        ("test_first_ten_minutes.py::", "test_scores.py::"),
        least=7,
    ),
    Guarantee(
        "ready notebooks",
        EVERY_CHANGE,
        "the notebooks for Colab and Kaggle, on a TPU and on T4, executed cell by cell on a CPU, smallest model",
        ("test_ready_notebooks.py::",),
        least=10,
    ),
    Guarantee(
        "real model",
        EVERY_CHANGE,
        "all 30 layers of SmolLM2: logits of transformers, ten steps of PyTorch with PEFT",
        ("test_smollm2.py::",),
        least=2,
    ),
    Guarantee(
        "preferences",
        EVERY_CHANGE,
        "losses, metrics and gradients of TRL's trainers; packed, split over micro-batches and eight devices; runs "
        "of SFT and DPO, resumed from checkpoints; sweeps of beta; KTO; losses in files",
        (
            "test_preference_losses.py::",
            "test_preference_step.py::",
            "test_preference_runs.py::",
            "test_preference_formulas.py::",
            "test_own_loss.py::",
        ),
        least=150,
    ),
    Guarantee(
        "adapters in one batch",
        EVERY_CHANGE,
        "served rows that use different adapters: logits and tokens of each one alone, over architectures and meshes",
        ("test_adapter_stack.py::",),
        least=20,
    ),
    Guarantee(
        "golden losses",
        EVERY_CHANGE,
        "recorded losses of this backend, and a resumed run bit for bit, with XLA's optimizations",
        ("test_golden.py::test_losses_on_the_cpu", "test_golden.py::test_a_resumed_run"),
        least=2,
    ),
    Guarantee(
        "eight devices",
        EVERY_CHANGE,
        "losses and adapters of every mesh equal one device, also with experts and micro-batches",
        (
            "test_mesh.py::test_many_devices",
            "test_mesh.py::test_micro_batches",
            "test_mesh.py::test_experts_on_a_mesh",
            "test_mesh.py::test_recomputation",
        ),
        least=8,
    ),
    Guarantee(
        "dropout",
        EVERY_CHANGE,
        "every split of a batch into micro-batches and devices gives the same numbers",
        ("test_dropout.py::",),
        least=8,
    ),
    Guarantee(
        "resume",
        EVERY_CHANGE,
        "from every checkpoint of a run with two stages, dropout and packing; after kills at random times",
        ("test_resume.py::test_resumed_from", "test_interruptions.py::test_killed_at_random"),
        least=10,
    ),
    Guarantee(
        "architectures",
        EVERY_CHANGE,
        "23 architectures, which cover every mechanism, each with all seven questions",
        ("test_architectures.py::test_engine_equals_pytorch",),
        least=20,
    ),
    Guarantee(
        "multimodal wrappers",
        RELEASE,
        "every family: logits and gradients of PyTorch, packing, bfloat16",
        ("test_wrappers.py::test_a_wrapper_on_text",),
        least=20,
    ),
    Guarantee(
        "experts",
        EVERY_CHANGE,
        "every family: gradients of PEFT, merged files, meshes; runs that learn and resume",
        (
            "test_experts.py::test_logits_and_gradients",
            "test_experts.py::test_experts_are_merged",
            "test_experts.py::test_experts_on_a_mesh",
            "test_expert_runs.py::test_a_run_learns",
            "test_expert_runs.py::test_peft_computes",
        ),
        least=25,
    ),
    Guarantee(
        "planted defects",
        EVERY_CHANGE,
        "every planted defect of adapters and exports in each type is caught, every harmless rewrite passes",
        ("test_certify.py::test_planted_defect", "test_certify.py::test_correct", "test_more_defects.py::"),
        least=300,
    ),
    Guarantee(
        "isolation and secrets",
        EVERY_CHANGE,
        "whole runs of every verb in a folder of hostile Python files; canary values in whole runs; mutated folders",
        (
            "test_isolation.py::test_no_whole_run",
            "test_isolation.py::test_no_verb",
            "test_promises.py::test_no_secret",
            "test_promises.py::test_no_file_is_unpickled",
            "test_mutations.py::",
        ),
        least=15,
    ),
)


def in_evidence(node: str) -> bool:
    """Whether `make evidence` runs the test for every change."""
    path, _, name = node.partition("::")
    test = f"{path.rpartition('/')[2]}::{name}"
    return any(each.part == EVERY_CHANGE and test.startswith(each.tests) for each in EVIDENCE)
