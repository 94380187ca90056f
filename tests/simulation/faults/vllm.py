"""Faults of the adapter for vLLM, shown by tests in real engines."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_ENVIRONMENT = ".venv-vllm-0.32.0"
_FOLDER = "kv_connector/engines/vllm"
_TESTS = "integration/tests"
_HYBRID = f"{_TESTS}/test_vllm_hybrid.py"
_CONTEXT = f"{_TESTS}/test_vllm_context.py"
_SESSIONS = f"{_TESTS}/test_vllm_sessions.py"
_WITHIN_DRAFTS = "test_a_turn_that_ends_within_accepted_drafts_spoils_nothing"
_SHARED = "test_who_shares_what_was_not_loaded_does_not_count_on_another_to_compute_it"
_NO_ROOM = f"{_TESTS}/test_vllm_no_room.py"
_WAITS_FOR_ADAPTER = "test_who_waits_for_its_adapter_behind_a_load_that_fails_does_not_keep_blocks_from_those_in_front"
_WANTS_ITS_PROMPT_COMPUTED = "test_who_waits_behind_one_that_begins_anew_wants_its_prompt_computed_all_the_same"
_IDENTITY = f"{_TESTS}/test_vllm_identity.py"
_ONE_IS_ENOUGH = f"{_TESTS}/test_vllm_failed_loads.py::test_one_request_whose_step_is_planned_on_is_enough"
_ALONE = "test_with_windows_alone_a_load_that_fails_gives_no_wrong_token"


def _mutant(name: str, title: str, patch: Patch, *tests: str) -> Mutant:
    return Mutant(name, title, (patch,), tested("-W", "ignore", *tests), _ENVIRONMENT)


VLLM: tuple[Mutant, ...] = (
    _mutant(
        "null-block-copied",
        "vLLM's null block is a block like any other",
        Patch(f"{_FOLDER}/steps.py", "NO_BLOCK if block_id == NULL_BLOCK else block_id", "block_id"),
        f"{_TESTS}/test_vllm_steps.py",
    ),
    _mutant(
        "drafts-of-nobody",
        "vLLM names the model itself in place of a draft model: with n-grams an engine finds nothing of one without",
        Patch(f"{_FOLDER}/identity.py", " if has_draft(vllm_config) else None", ""),
        f"{_TESTS}/test_vllm_identity.py::test_who_looks_for_drafts_in_tokens_caches_what_others_do",
    ),
    _mutant(
        "windows-in-the-step",
        "a model of several groups loads in the step, where a failure ends the engine",
        Patch(f"{_FOLDER}/scheduler.py", "not TELLS_FAILED_REQUESTS or may_truncate(shape.groups)", "True"),
        f"{_TESTS}/test_vllm_engine.py::test_a_failed_load_is_a_miss_or_one_failed_request",
    ),
    _mutant(
        "shared-failure",
        "who shares a block that was not loaded goes on behind it, as vLLM has it",
        Patch(f"{_FOLDER}/scheduler.py", "if first is not None:", "if False:"),
        f"{_TESTS}/test_vllm_failed_loads.py::{_SHARED}",
    ),
    _mutant(
        "computes-in-front",
        "who wants its prompt computed is looked at in front of those that begin anew with blocks that it needs",
        Patch(f"{_FOLDER}/scheduler.py", "            self._put_off(request)\n", ""),
        f"{_NO_ROOM}::{_WAITS_FOR_ADAPTER}[False-False]",
    ),
    _mutant(
        "adapters-of-before",
        "an adapter that was replaced under its name and path hits what its old weights have computed",
        Patch(f"{_FOLDER}/scheduler.py", "if self._replaced.has(request):", "if False:"),
        f"{_TESTS}/test_vllm_requests.py::test_an_adapter_that_was_replaced_hits_nothing_of_its_old_weights",
    ),
    _mutant(
        "put-off-for-good",
        "who was put off behind a request that begins anew waits on where that one's client goes away",
        Patch(
            f"{_FOLDER}/scheduler.py", "self._end_anew(request.request_id)\n        self._sessions", "self._sessions"
        ),
        f"{_NO_ROOM}::{_WANTS_ITS_PROMPT_COMPUTED}[False-True]",
    ),
    _mutant(
        "adapters-till-any-reset",
        "a reset that vLLM refuses for its own cache, which has blocks of old weights, makes an adapter a new one",
        Patch(f"{_FOLDER}/scheduler.py", "        if not self._is_held():  # or vLLM", "        if True:  # or vLLM"),
        f"{_TESTS}/test_vllm_requests.py::test_an_adapter_stays_replaced_where_a_reset_leaves_vllms_own_cache",
    ),
    _mutant(
        "adapters-gone-are-known",
        "an adapter whose files are gone is the one that it was, whatever vLLM has read in between",
        Patch(
            f"{_FOLDER}/identity.py",
            "if self._first.setdefault(key, found) != found",
            "if found[1] and self._first.setdefault(key, found) != found",
        ),
        f"{_IDENTITY}::test_an_adapter_whose_files_come_or_go_after_its_first_request_is_a_replaced_one",
    ),
    _mutant(
        "adapters-anywhere",
        "an adapter of a hub that has another path is the one that it was, where vLLM's hashes have its name alone",
        Patch(f"{_FOLDER}/identity.py", "found = lora.lora_path, local", "found = lora.lora_name, local"),
        f"{_IDENTITY}::test_an_adapter_of_the_same_name_at_another_path_is_a_replaced_one_where_hashes_have_names_alone",
    ),
    _mutant(
        "adapters-gone-are-stored",
        "what an adapter computes whose files are gone is stored as computed by those that were there",
        Patch(
            f"{_FOLDER}/identity.py",
            "changes = local_changes(lora.lora_path)",
            "changes = local_changes(lora.lora_path) or self._changes.get(key)",
        ),
        f"{_IDENTITY}::test_an_adapter_is_known_by_its_weights",
    ),
    _mutant(
        "drafts-behind-a-turn",
        "a session goes on behind drafts that its turn has not said, as vLLM has it",
        Patch(f"{_FOLDER}/scheduler.py", "self._sessions.taken_in()", "pass"),
        f"{_SESSIONS}::{_WITHIN_DRAFTS}",
    ),
    _mutant(
        "drafts-that-were-said",
        "of a session's next input nothing is left to compute where it is what was drafted",
        Patch(f"{_FOLDER}/sessions.py", " - (request.status is RequestStatus.WAITING)", ""),
        f"{_SESSIONS}::{_WITHIN_DRAFTS}",
    ),
    _mutant(
        "drafts-taken-for-input",
        "where a session's next input has come already its first tokens count as computed",
        Patch(f"{_FOLDER}/sessions.py", "if token != draft", "if not token"),
        f"{_SESSIONS}::{_WITHIN_DRAFTS}",
    ),
    _mutant(
        "drafts-of-before",
        "a session's turn is cut at the drafts of an earlier step",
        Patch(
            f"{_FOLDER}/sessions.py",
            "            del self._drafted[request_id]\n        for",
            "            pass\n        for",
        ),
        f"{_SESSIONS}::test_drafts_of_an_earlier_step_or_of_an_ended_session_are_forgotten",
    ),
    _mutant(
        "states-in-the-step",
        "a recurrent state is loaded in the step, which has read it by then",
        Patch(f"{_FOLDER}/scheduler.py", "or may_truncate(shape.groups)", "or len(shape.groups) == 1"),
        f"{_HYBRID}::test_what_comes_from_the_host_answers_as_the_device_and_as_computing_do[states_only]",
    ),
    _mutant(
        "states-unseen",
        "the engine's word is enough for which block holds which state",
        Patch(
            f"{_FOLDER}/scheduler.py",
            "return self._blocks.is_cached_as(state.block_id, block_hash, group_id)",
            "return True",
        ),
        f"{_TESTS}/test_vllm_steps.py::test_what_is_not_the_state_that_it_is_told_to_be_is_not_kept",
    ),
    _mutant(
        "states-of-hits-untold",
        "a state is seen once, when it is computed: one that is hit on the device never comes to the host",
        Patch(f"{_FOLDER}/steps.py", "in _begun(output):", "in ():"),
        f"{_TESTS}/test_vllm_steps.py::test_a_state_that_a_request_begins_with_is_told_of",
    ),
    _mutant(
        "states-of-hits-beside",
        "the state that a request goes on with is told of as that which it begins with",
        Patch(f"{_FOLDER}/steps.py", "(num_tokens - 1) // size]", "num_tokens // size]"),
        f"{_TESTS}/test_vllm_steps.py::test_a_state_that_a_request_begins_with_is_told_of",
    ),
    _mutant(
        "states-of-preempted",
        "a state of a request that has lost its blocks in the step is saved",
        Patch(f"{_FOLDER}/scheduler.py", "state.request_id in (output.preempted_req_ids or ())", "False"),
        f"{_TESTS}/test_vllm_steps.py::test_what_is_not_the_state_that_it_is_told_to_be_is_not_kept",
    ),
    _mutant(
        "states-within-blocks",
        "a state from the middle of a block is kept as that of its end",
        Patch(
            f"{_FOLDER}/scheduler.py",
            "if rest or (not self._ends_within and num_hashes % self.shape.groups[state.group].hashes_per_block):",
            "if False:",
        ),
        f"{_TESTS}/test_vllm_steps.py::test_what_is_not_the_state_that_it_is_told_to_be_is_not_kept",
    ),
    _mutant(
        "states-gone-on-with",
        "the state that a request goes on with inside of a block is told of as that which it begins with",
        Patch(f"{_FOLDER}/steps.py", "_copied(output).get(block_id, NULL_BLOCK)", "block_id + 0"),
        f"{_TESTS}/test_vllm_steps.py::test_a_state_that_a_request_begins_with_is_told_of",
    ),
    _mutant(
        "ends-without-attention",
        "where a prompt ends inside of blocks the state is kept, and not the rows in front of it",
        Patch(f"{_FOLDER}/scheduler.py", "states += list(told_ends(output, self.shape, states))", "pass"),
        f"{_HYBRID}::test_hits_end_where_those_of_vllm_do[mamba-32]",
    ),
    _mutant(
        "ends-of-the-next-block",
        "of attention the block behind the one that a prompt ends inside of is kept",
        Patch(f"{_FOLDER}/steps.py", "[num_tokens // size], ", "[min(num_tokens // size + 1, len(tables[0]) - 1)], "),
        f"{_TESTS}/test_vllm_steps.py::test_where_a_prompt_ends_inside_of_blocks_attention_is_told_of",
    ),
    _mutant(
        "ends-of-another-prompt",
        "of attention the block that a hit was copied from is kept for what the step has computed behind the hit",
        Patch(
            f"{_FOLDER}/steps.py",
            "tables[shape.group_ids[index]][num_tokens // size], num_tokens)",
            "_copied(output).get(i := tables[shape.group_ids[index]][num_tokens // size], i), num_tokens)",
        ),
        f"{_TESTS}/test_vllm_steps.py::test_where_a_prompt_ends_inside_of_blocks_attention_is_told_of",
        f"{_HYBRID}::test_what_is_computed_behind_a_hit_inside_of_a_block_is_saved_with_it",
    ),
    _mutant(
        "states-of-any-rounding",
        "states that another backend has computed, or rounded by chance, have the names of this one's",
        Patch(f"{_FOLDER}/identity.py", "has_states=bool(states)", "has_states=False"),
        f"{_TESTS}/test_vllm_identity.py::test_how_states_are_computed_and_rounded_is_named",
    ),
    _mutant(
        "stages-of-any-split",
        "stages that have other layers, and blocks of the same size, have the names of this pipeline's",
        Patch(f"{_FOLDER}/identity.py", "if pp_size > 1 else []", "if pp_size > 9 else []"),
        f"{_TESTS}/test_vllm_pipeline.py::test_storage_is_found_by_no_other_split_of_the_layers",
    ),
    Mutant(
        "windows-alone-on-older",
        "an older vLLM goes on behind blocks of a window that were never loaded",
        (
            Patch(
                f"{_FOLDER}/scheduler.py",
                "if self.shape.recomputes and not may_truncate(self.shape.groups):",
                "if False:",
            ),
        ),
        tested("-W", "ignore", f"{_TESTS}/test_vllm_failed_loads.py::{_ALONE}"),
        ".venv-vllm-0.25.1",
    ),
    _mutant(
        "tokens-of-one-rank",
        "a block that ranks share out has the tokens of one rank's part",
        Patch(
            f"{_FOLDER}/groups.py",
            "return int(kv_cache_utils.resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size))",
            "return int(spec.block_size)",
        ),
        f"{_CONTEXT}::test_a_block_spans_what_vllm_says",
    ),
    _mutant(
        "tokens-of-every-rank",
        "a block of layers that every rank has whole has the tokens of all of them",
        Patch(
            f"{_FOLDER}/groups.py",
            "kv_cache_utils.resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size)",
            "spec.block_size * parallel.decode_context_parallel_size",
        ),
        f"{_CONTEXT}::test_layers_that_are_not_shared_out_have_smaller_blocks_and_are_copied_whole",
    ),
    _mutant(
        "parts-of-any-rank",
        "storage gives a rank another one's part of a block",
        Patch("kv_connector/index/identity.py", 'f"{self.rank} of {self.world_size}"', 'f"any of {self.world_size}"'),
        f"{_CONTEXT}::test_the_next_engine_of_the_same_sizes_answers_from_storage_and_no_other",
    ),
    _mutant(
        "parts-of-any-interleave",
        "engines that share out a block's tokens in other runs are taken for the same",
        Patch(f"{_FOLDER}/identity.py", "older if older > 1 else parallel.cp_kv_cache_interleave_size", "1"),
        f"{_CONTEXT}::test_the_next_engine_of_the_same_sizes_answers_from_storage_and_no_other",
    ),
    _mutant(
        "chunk-as-full",
        "a hit needs every block of chunked attention, of which vLLM holds the last chunk's",
        Patch(f"{_FOLDER}/groups.py", "if manager == _CHUNK:", "if False:"),
        f"{_TESTS}/test_vllm_chunks.py::test_hits_end_where_those_of_vllm_do_whatever_is_left_of_a_chunk",
    ),
    _mutant(
        "ended-in-sleep",
        "what ends while the engine sleeps is told where vLLM hears one rank of several",
        Patch(f"{_FOLDER}/worker.py", "        if self._has_told_ready:\n", "        if False:\n"),
        f"{_CONTEXT}::test_what_has_ended_during_a_sleep_is_told_with_the_next_step",
    ),
    _mutant(
        "planned-on",
        "vLLM goes on with the step that it has planned behind a load that failed",
        Patch(f"{_FOLDER}/scheduler.py", "if self.shape.recomputes_wrongly and has", "if False and has"),
        f"{_TESTS}/test_vllm_pipeline.py::test_a_step_that_must_not_be_planned_on_ends_the_engine_and_says_why",
    ),
    _mutant(
        "counted-on",
        "Model Runner V2 goes on behind a load that failed",
        Patch(f"{_FOLDER}/specs.py", "        or runs_model_runner_v2(vllm_config),\n", "        or False,\n"),
        f"{_TESTS}/test_vllm_ahead.py::test_a_failed_load_ends_an_engine_whose_runner_counts_a_requests_tokens_itself",
    ),
    _mutant(
        "hashes-for-blocks",
        "routers are told that every group's blocks have the tokens of one hash",
        Patch(f"{_FOLDER}/events.py", "block_size=self._shape.block_sizes[group]", "block_size=self._shape.block_size"),
        f"{_TESTS}/test_vllm_telemetry.py"
        "::test_routers_learn_the_same_of_a_block_on_the_host_as_on_the_device[two_sizes-write_back]",
    ),
    _mutant(
        "overlooked-continued",
        "a request that was preempted continues with what a step made of a load that has failed",
        Patch(f"{_FOLDER}/scheduler.py", "if waits and (takes_output or ", "if waits and (False and "),
        f"{_TESTS}/test_vllm_failed_loads.py"
        "::test_a_load_that_fails_behind_vllms_back_ends_the_engine_and_not_in_wrong_tokens",
    ),
    _mutant(
        "waiting-trusted",
        "a request that waits for room, where vLLM does not look, continues with a load that has failed",
        Patch(
            f"{_FOLDER}/scheduler.py",
            "if holds and (waits or self.shape.recomputes):",
            "if holds and not waits and self.shape.recomputes:",
        ),
        _NO_ROOM,
    ),
    _mutant(
        "waiting-hits",
        "vLLM is to give the blocks of a hit to a request that has its own",
        Patch(
            f"{_FOLDER}/scheduler.py",
            "request.skip_reading_prefix_cache = True\n            self._begun_anew.add(",
            "self._begun_anew.add(",
        ),
        _NO_ROOM,
    ),
    _mutant(
        "waiting-hits-never",
        "a request whose load has failed while it waited for room hits nothing, whatever becomes of it",
        Patch(
            f"{_FOLDER}/scheduler.py",
            "request.skip_reading_prefix_cache = False\n            self._end_anew(",
            "self._end_anew(",
        ),
        _NO_ROOM,
    ),
    _mutant(
        "waiting-read",
        "an engine that plans ahead ends where a load fails that no step was to read",
        Patch(f"{_FOLDER}/scheduler.py", " and has_failed_in_step and may_take_output:", " and has_failed_in_step:"),
        _NO_ROOM,
    ),
    _mutant(
        "last-one-decides",
        "of several requests that hold what was not loaded the last one says whether a step's output may be kept",
        Patch(f"{_FOLDER}/scheduler.py", "may_take_output |= ", "may_take_output = "),
        _ONE_IS_ENOUGH,
    ),
    _mutant(
        "computed-ahead",
        "a request behind whose tokens a block was not loaded counts as computed up to there",
        Patch(
            f"{_FOLDER}/scheduler.py",
            "request.num_computed_tokens = min(request.num_computed_tokens, first * size)",
            "request.num_computed_tokens = first * size",
        ),
        _ONE_IS_ENOUGH,
    ),
    _mutant(
        "loading-read",
        "an engine that plans ahead ends for a request that still loads, which no step has read",
        Patch(f"{_FOLDER}/scheduler.py", "(*_WAITS, RequestStatus.WAITING_FOR_REMOTE_KVS)", "_WAITS"),
        _ONE_IS_ENOUGH,
    ),
    _mutant(
        "lost-blocks-named",
        "vLLM hits what a failed load was to fill",
        Patch(f"{_FOLDER}/blocks.py", "        self._pool.evict_blocks(set(block_ids))\n", "        pass\n"),
        f"{_TESTS}/test_vllm_failed_loads.py::test_what_a_given_up_request_has_not_loaded_is_hit_by_nobody",
    ),
    _mutant(
        "pins-refuse-resets",
        "a save under way makes vLLM refuse a reset, and raise where it must not",
        Patch(f"{_FOLDER}/blocks.py", "        if self._is_held():\n", "        if True:\n"),
        f"{_TESTS}/test_vllm_ahead.py::test_resets_while_steps_and_saves_are_under_way[write_through]",
    ),
    _mutant(
        "first-step-saves-nothing",
        "the first request after the start is not saved",
        Patch(f"{_FOLDER}/scheduler.py", "        self.half.update_connector_output(ready)\n", ""),
        f"{_TESTS}/test_vllm_engine.py::test_the_first_request_after_the_start_is_hit_by_the_second",
    ),
    _mutant(
        "all-cleared",
        "a reset of the host tells routers that the device was cleared",
        Patch(
            f"{_FOLDER}/events.py",
            "            elif isinstance(event, BlockRemoved):\n",
            "            elif False:\n",
        ),
        f"{_TESTS}/test_vllm_telemetry.py::test_a_reset_that_vllm_refused_for_the_device_says_nothing_of_the_device",
    ),
    _mutant(
        "hits-all-of-the-host",
        "what came from storage counts as the host's",
        Patch(
            f"{_FOLDER}/scheduler.py",
            'sources = {"p2p": peer, "disk": storage, "host": num_external_tokens - peer - storage}',
            'sources = {"host": num_external_tokens}',
        ),
        f"{_TESTS}/test_vllm_storage.py::test_the_next_engine_answers_from_the_folder",
    ),
    _mutant(
        "orphans",
        "events of the host do not name a block's parent",
        Patch(
            f"{_FOLDER}/events.py",
            "parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None",
            "parent_block_hash=None",
        ),
        f"{_TESTS}/test_vllm_telemetry.py::test_routers_learn_the_same_of_a_block_on_the_host_as_on_the_device",
    ),
    _mutant(
        "kinds-by-subclass",
        "kinds of attention that are not served pass as those that they derive from",
        Patch(f"{_FOLDER}/groups.py", '"SinkFullAttentionManager")', '"SinkFullAttentionManager", "RSWAManager")'),
        f"{_TESTS}/test_vllm_startup.py::test_kinds_of_attention_that_are_not_served",
    ),
    _mutant(
        "state-types-unnamed",
        "states of float16 and of bfloat16 are found under one name",
        Patch(f"{_FOLDER}/identity.py", "{model.dtype}{states}", "{model.dtype}"),
        f"{_HYBRID}::test_states_of_another_type_are_not_found",
    ),
)
