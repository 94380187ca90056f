"""Faults of the adapter for SGLang, shown by tests between SGLang's own classes."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_ENVIRONMENT = ".venv-sglang"
_FOLDER = "kv_connector/engines/sglang"
_LINKER = "integration/tests/test_sglang_linker.py"
_PROMISES = "integration/tests/test_sglang_promises.py"
_PAGES = "integration/tests/test_sglang_pages.py"
_RANKS = "integration/tests/test_sglang_ranks.py"
_HICACHE = "integration/tests/test_sglang_hicache.py"
_POOLS = "integration/tests/test_sglang_hicache_pools.py"


def _mutant(name: str, title: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, title, (Patch(f"{_FOLDER}/{file}", old, new),), tested("-W", "ignore", *tests), _ENVIRONMENT)


SGLANG: tuple[Mutant, ...] = (
    _mutant(
        "promises-unleased",
        "what SGLang is told that it can load may be evicted before it does",
        "fragments.py",
        "        self._host.acquire(host_ids)\n",
        "        host_ids = []\n",
        f"{_PROMISES}::test_what_is_promised_stays_until_it_is_loaded",
    ),
    _mutant(
        "promises-for-ever",
        "requests that give up before they are admitted hold host blocks for good",
        "fragments.py",
        "        oldest = self._clock() - PROMISED_SECONDS\n",
        "        oldest = -1.0\n",
        f"{_PROMISES}::test_a_promise_lapses_and_the_load_is_refused",
    ),
    _mutant(
        "promises-renewed",
        "requests that are looked up in each round hold host blocks for as long as they wait",
        "fragments.py",
        "        made_at = now if before is None else before.made_at\n",
        "        made_at = now\n",
        f"{_PROMISES}::test_requests_that_are_looked_up_in_each_round_leave_room_to_others",
    ),
    _mutant(
        "queued-loads-lapse",
        "the promise of a request that waited long lapses when its load is queued, and SGLang aborts it",
        "linker.py",
        "        self._promises.keep(rid)\n",
        "",
        f"{_PROMISES}::test_requests_that_are_looked_up_in_each_round_leave_room_to_others",
    ),
    _mutant(
        "chunks-apart",
        "of a prompt that was computed in chunks the heads are evicted, and tails stay that nobody reaches",
        "linker.py",
        "        return [front] if front is not None and self._half.tree.get(front) is not None else []\n",
        "        return []\n",
        f"{_LINKER}::test_a_prompt_that_was_computed_in_chunks_is_found_as_one_that_was_not",
    ),
    _mutant(
        "lost-promises-loaded",
        "a promise is good also where the blocks were found not to be",
        "linker.py",
        " or self._promises.num_kept(rid) < len(hashes):",
        ":",
        f"{_PROMISES}::test_what_failed_for_one_is_refused_to_others_who_were_promised_it",
    ),
    _mutant(
        "lost-loads-untold",
        "a load that was accepted, and whose blocks were lost before it began, is said to have come",
        "linker.py",
        "        return has_come and not self._has_lost\n",
        "        return has_come\n",
        f"{_PROMISES}::test_a_load_of_what_was_lost_while_it_was_queued_is_told",
    ),
    _mutant(
        "loads-beside-forward",
        "loads begin while the pass before them writes to pages that it has given back",
        "linker.py",
        "        with self._behind_forward():\n            self._replica.begin(",
        "        with nullcontext():\n            self._replica.begin(",
        "integration/tests/test_sglang_world.py",
    ),
    _mutant(
        "loads-begun-by-look-ups",
        "a look-up that waits for storage begins what requests before it have queued",
        "linker.py",
        "        self._queued[rid] = fragment, self._pages.ids_of(slots)\n        return True\n",
        "        return self._plan_load(*self._queued.setdefault(rid, (fragment, self._pages.ids_of(slots))))\n",
        f"{_PROMISES}::test_who_waits_for_storage_begins_no_load_of_others",
    ),
    _mutant(
        "other-pages-loaded",
        "a load may name other pages than those that were promised",
        "linker.py",
        "fragment.block_hashes[: len(hashes)] != hashes",
        "len(fragment.block_hashes) < len(hashes)",
        f"{_PROMISES}::test_what_was_never_promised_is_not_loaded",
    ),
    _mutant(
        "slots-across-pages",
        "token slots that begin within a page are taken for that page",
        "pools.py",
        "(firsts % self._page_size == 0) & (lasts == firsts + self._page_size - 1)",
        "lasts == firsts + self._page_size - 1",
        f"{_PAGES}::test_slots_that_are_no_pages_are_told_and_not_written",
    ),
    _mutant(
        "cancelled-loads-done",
        "a load goes on after its request has ended, into pages that are others' by then",
        "linker.py",
        "fragment, _ = self._queued.pop(rid, (None, ()))",
        "fragment, _ = self._queued.get(rid, (None, ()))",
        f"{_PROMISES}::test_a_queued_load_that_is_cancelled_writes_nothing",
    ),
    _mutant(
        "failed-loads-untold",
        "SGLang goes on with pages that a load has not filled",
        "replica.py",
        "        return not lost\n\n    def has_saved",
        "        return True\n\n    def has_saved",
        f"{_PROMISES}::test_a_load_that_fails_is_told_and_not_tried_again",
    ),
    _mutant(
        "flushed-and-found",
        "what old weights have computed is found after an update",
        "linker.py",
        "        if not self._keep_on_flush:\n",
        "        if False:\n",
        f"{_LINKER}::test_a_flush_forgets_all",
    ),
    _mutant(
        "offers-stored",
        "SGLang is told that pages are stored for good, and never offers them again",
        "linker.py",
        "        self._saving.popleft()\n        return False\n",
        "        self._saving.popleft()\n        return True\n",
        f"{_LINKER}::test_a_prefix_that_was_offered_in_parts_is_one_hit",
    ),
    _mutant(
        "unlike-ranks-unnoticed",
        "ranks go on that have planned different jobs",
        "replica.py",
        "        if len({(len(rank.reports), rank.last_job, rank.num_offers) for rank in told}) > 1:\n",
        "        if False:\n",
        f"{_RANKS}::test_ranks_that_do_not_schedule_alike_say_so",
    ),
    _mutant(
        "offers-taken-alone",
        "each rank takes what was offered when it knows the pages, and not when all do",
        "replica.py",
        "        return min(rank.num_ready for rank in told)\n",
        "        return num_ready\n",
        "integration/tests/test_sglang_world.py",
    ),
    _mutant(
        "offers-of-nothing",
        "pages that the host had when they were offered are saved, though nobody has locked them",
        "linker.py",
        "            if pages is None and self._has_all(fragment.block_hashes)  # yet: SGLang has not locked them\n",
        "            if pages is None\n",
        f"{_LINKER}::test_what_the_host_has_let_go_of_before_it_is_counted_as_used_is_not_saved",
    ),
    _mutant(
        "reports-of-one-rank",
        "a job ends with this rank's report, whatever the others do",
        "replica.py",
        "            self.scheduler.update_connector_output(reports)\n",
        "            self.scheduler.update_connector_output(reports[:1])\n",
        f"{_RANKS}::test_ranks_decide_alike",
    ),
    _mutant(
        "adapters-by-path",
        "adapters of the launch line are known by their paths, whatever lies there by now",
        "identity.py",
        "f\"{path} {local_fingerprint(path) or 'unknown'}\"",
        "path",
        f"{_LINKER}::test_adapters_are_named_by_their_weights",
    ),
    Mutant(
        "fragments-unlinked",
        "a tail never learns what it follows, and stays when its head goes",
        (Patch("kv_connector/index/fragments.py", "if parent == ROOT or", "if True or parent == ROOT or"),),
        tested("tests/index/test_fragments.py"),
    ),
    Mutant(
        "fragments-miscounted",
        "a parent that is learned does not know of the child's copy, and is evicted in front of it",
        (
            Patch(
                "kv_connector/index/fragments.py",
                "                self.kids[tier][parent] += 1\n",
                "                pass\n",
            ),
        ),
        tested("tests/index/test_fragments.py"),
    ),
    _mutant(
        "late-pages-lent",
        "memory that storage still writes to is lent again",
        "host_pages.py",
        "future.add_done_callback(partial(self._give_back, slots))",
        "self._give_back(slots, future)",
        f"{_HICACHE}::test_a_late_answer_reaches_no_page",
    ),
    _mutant(
        "hung-storage-asked",
        "storage that has not answered is asked for more, and each batch of pages waits anew",
        "host_pages.py",
        "if self._patience.is_over or len(self._free) < count:",
        "if len(self._free) < count:",
        f"{_HICACHE}::test_a_late_answer_reaches_no_page",
    ),
    _mutant(
        "half-pages-read",
        "a page is good of which keys or values alone have come",
        "host_pages.py",
        "return [all(there[first : first + self.num_runs]) for",
        "return [any(there[first : first + self.num_runs]) for",
        f"{_HICACHE}::test_a_damaged_page_is_a_miss",
    ),
    _mutant(
        "host-pages-grouped",
        "a store of objects takes the first page of a call for the beginning of a group",
        "host_pages.py",
        "future = call(keys[batch], self._buffers(slots), True)",
        "future = call(keys[batch], self._buffers(slots), False)",
        f"{_HICACHE}::test_a_store_of_objects_finds_pages_wherever_they_are_in_a_prefix",
    ),
    _mutant(
        "host-ranks-alike",
        "ranks with heads of their own have one name in storage",
        "host_storage.py",
        "(0 if is_shared else config.tp_rank)",
        "0",
        f"{_POOLS}::test_ranks_read_what_is_theirs",
    ),
    _mutant(
        "host-states-shared",
        "where pages are the same on all ranks, states are taken to be",
        "host_storage.py",
        "config.is_mla_model and name != PoolName.MAMBA",
        "config.is_mla_model",
        f"{_POOLS}::test_ranks_read_what_is_theirs",
    ),
    _mutant(
        "host-slots-across-pages",
        "token slots that are no pages of the host pool are filled",
        "host_storage.py",
        "        if not are_whole or (starts < 0).any() or (starts >= self._num_slots).any():\n",
        "        if False:\n",
        f"{_HICACHE}::test_what_cannot_be_is_a_miss_and_not_an_error",
    ),
    _mutant(
        "clears-undone",
        "a second clear finds again what was stored before the first",
        "hicache.py",
        "        self._salt = hashlib.sha256(self._salt).digest()\n",
        "",
        f"{_HICACHE}::test_what_is_cleared_is_never_found_again",
    ),
    _mutant(
        "clears-forgotten",
        "what was cleared is found again when storage is attached again",
        "hicache.py",
        "            storage.rename(salt)\n",
        "            pass\n",
        f"{_HICACHE}::test_what_is_cleared_stays_so_when_storage_is_attached_again",
    ),
    _mutant(
        "patience-of-each-pool",
        "a store that hangs is waited for by each pool, until SGLang's scheduler ends for it",
        "host_storage.py",
        "        self._patience = patience\n        self._pages = pages = open_pages(pool, patience)\n",
        "        self._patience = Patience()\n        self._pages = pages = open_pages(pool, self._patience)\n",
        f"{_HICACHE}::test_a_store_that_hangs_is_waited_for_once",
    ),
    _mutant(
        "host-errors-raised",
        "what goes wrong in a look-up, read or write is raised into SGLang's threads",
        "hicache.py",
        "            return otherwise\n",
        "            raise\n",
        f"{_HICACHE}::test_what_cannot_be_is_a_miss_and_not_an_error",
    ),
)
