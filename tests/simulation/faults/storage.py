"""Faults of storage: what is waited for, written, and shared with other processes."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_FETCHES = "kv_connector/scheduler/storage/fetches.py"
_FOLLOWERS = "kv_connector/scheduler/storage/followers.py"
_PREFETCHES = "kv_connector/scheduler/storage/prefetches.py"
_BACKUPS = "kv_connector/scheduler/storage/backups.py"
_READING = "kv_connector/scheduler/storage/reading.py"
_FILESYSTEM = "kv_connector/storage/filesystem"
_SIMULATED_DISK = "tests/simulation/test_disk.py"
_BACKEND = "tests/storage/filesystem/test_backend.py"
_DAMAGE = "tests/storage/filesystem/test_damage.py"
_FOREIGN = "tests/storage/filesystem/test_foreign.py"
_JOURNAL = "tests/storage/filesystem/test_journal.py"
_LOCK = "tests/storage/filesystem/test_lock.py"
_TESTS = "tests/scheduler/storage/test_companion.py"

_CHECKED = "kv_connector/storage/checked.py"
_OTHERS = "tests/storage/test_checked.py"
_S3 = "kv_connector/storage/s3/client.py"
_S3_FAULTS = "tests/storage/s3/test_faults.py"

_TOLD = "kv_connector/scheduler/storage/told.py"

STORAGE: tuple[Mutant, ...] = (
    Mutant(
        "called-off-once",
        "a job of storage that was wanted again after all goes on when the last has left it for good",
        (Patch(_FOLLOWERS, "            self._cancelled.discard(job_id)\n\n    def leave", "\n    def leave"),),
        tested("tests/scheduler/storage/test_followers.py"),
    ),
    Mutant(
        "told-of-another-row",
        "routers are told that a block is gone which has the row of one that a reset let go of",
        (Patch(_TOLD, " if self._host.holds_copy(host_id)]", "]"),),
        tested(
            "tests/scheduler/storage/test_told.py::test_a_fetch_that_begins_behind_a_reset_says_nothing_of_who_has_its_rows_by_then"
        ),
    ),
    Mutant(
        "object-not-named",
        "an object that a backend of the user's own has under another key is taken for the right one",
        (Patch(_CHECKED, "return label == [self._magic, name] and", "return label[0] == self._magic and"),),
        tested(f"{_OTHERS}::test_other_bytes_are_a_miss_and_are_removed"),
    ),
    Mutant(
        "object-not-checked",
        "bytes of a backend of the user's own are not compared with their checksum",
        (Patch(_CHECKED, "and self._block_check.fits(name, view[: self._block_bytes], checksum)", "and True"),),
        tested(f"{_OTHERS}::test_other_bytes_are_a_miss_and_are_removed"),
    ),
    Mutant(
        "hung-backend-asked",
        "a backend that hangs is asked again and again",
        (Patch(_CHECKED, "        if not self.breaker.allows:\n", "        if False:\n"),),
        tested(f"{_OTHERS}::test_what_is_written_when_nobody_waits_any_more_lands_nowhere"),
    ),
    Mutant(
        "lost-probe-waited-for",
        "a backend whose answer to one probe is lost is never asked again",
        (Patch(_CHECKED, "            probe.end(False)\n        if self", "            pass\n        if self"),),
        tested(f"{_OTHERS}::test_a_probe_whose_answer_is_lost_is_not_the_last"),
    ),
    Mutant(
        "late-probe-believed",
        "a late answer to a probe that was given up counts for the one that is out",
        (Patch(_CHECKED, "if self._ended.acquire(blocking=False):", "if True:"),),
        tested(f"{_OTHERS}::test_a_probe_whose_answer_is_lost_is_not_the_last"),
    ),
    Mutant(
        "keys-of-all-ranks",
        "keys of another rank or model are the same to a backend of the user's own",
        (Patch(_CHECKED, "digest_size=32, key=self._identity)", "digest_size=32)"),),
        tested(f"{_OTHERS}::test_another_model_or_rank_that_shares_the_backend_finds_nothing"),
    ),
    Mutant(
        "object-half-copied",
        "bytes of a backend of the user's own that are not whole are copied into the host",
        (Patch(_CHECKED, "            if is_good:\n", "            if True:\n"),),
        tested(f"{_OTHERS}::test_what_is_not_whole_is_not_copied_into_the_callers_memory"),
    ),
    Mutant(
        "unwritten-is-stored",
        "a block that a backend of the user's own did not store counts as stored",
        (Patch(_CHECKED, "strict=True) if is_stored}", "strict=True)}"),),
        tested(f"{_OTHERS}::test_a_block_that_was_not_stored_is_not_called_stored"),
    ),
    Mutant(
        "found-beyond-the-end",
        "a backend of the user's own may find more blocks than it was asked for",
        (Patch(_CHECKED, "return min(len(keys), max(0, int(", "return min(1 << 62, max(-9, int("),),
        tested(f"{_OTHERS}::test_no_more_is_found_than_was_asked_for"),
    ),
    Mutant(
        "failed-probe-is-out",
        "a backend that raises when it is asked whether it is back counts as asked",
        (Patch(_CHECKED, "raises\n                probe.end(False)", "raises\n                pass"),),
        tested(f"{_OTHERS}::test_a_probe_that_cannot_be_made_has_failed"),
    ),
    Mutant(
        "batch-of-any-size",
        "a long batch for a backend of the user's own takes as much memory again",
        (Patch(_CHECKED, "max(1, _BATCH_BYTES // self._object_bytes)", "1 << 30"),),
        tested(f"{_OTHERS}::test_a_long_batch_takes_a_bounded_part_of_memory"),
    ),
    Mutant(
        "s3-any-length",
        "an object of S3 that has another length is copied into memory",
        (
            Patch(_S3, '        if result.meta["size"] != num_bytes:\n', "        if False:\n"),
            Patch(_S3, "        if body.nbytes != num_bytes:\n", "        if False:\n"),
        ),
        tested("tests/storage/s3/test_client.py::test_an_object_of_another_length_is_damaged_and_nothing_is_read"),
    ),
    Mutant(
        "s3-asks-on",
        "an endpoint of S3 that hangs is asked for all that is queued",
        (Patch(_S3, "if self._num_unanswered != num_unanswered:", "if False:"),),
        tested(f"{_S3_FAULTS}::test_an_endpoint_that_hangs_costs_one_time_out_whatever_is_queued"),
    ),
    Mutant(
        "s3-log-has-answers",
        "the log repeats what S3 says, and so a token",
        (Patch(_S3, 'return _Fault(f"{said}: {fix}" if fix', 'return _Fault(f"{error}" if fix'),),
        tested(f"{_S3_FAULTS}::test_no_log_and_no_text_has_credentials_in_it"),
    ),
    Mutant(
        "backups-take-all",
        "what waits to be written may take the whole host",
        (Patch(_BACKUPS, "share = self._host.pool.capacity // _HOST_SHARE", "share = self._most_blocks"),),
        tested(
            "tests/scheduler/storage/test_backups.py::test_storage_that_is_slower_than_the_model_keeps_a_share_of_the_host"
        ),
    ),
    Mutant(
        "backups-of-a-hung-storage",
        "blocks are queued for storage that does not answer",
        (Patch(_BACKUPS, "if oldest is not None and self._shared.clock() - oldest > LOST_SECONDS:", "if False:"),),
        tested("tests/scheduler/storage/test_backups.py"),
    ),
    Mutant(
        "backups-outlive-resets",
        "blocks that wait to be written stay leased behind a reset",
        (Patch(_BACKUPS, "        self._host.release(waiting)\n", ""),),
        tested(f"{_TESTS}::test_a_reset_lets_go_of_what_waits_to_be_written"),
    ),
    Mutant(
        "fetches-take-all",
        "fetches may take the whole host",
        (Patch(_FETCHES, "most = capacity - capacity // _LEFT_SHARE - self._fetches.num_blocks", "most = capacity"),),
        tested(f"{_TESTS}::test_fetches_leave_a_share_of_the_host_to_others"),
    ),
    Mutant(
        "abandoned-and-free",
        "blocks of a fetch that was lost count as free, though storage may write to them yet, and others take the rest",
        (
            Patch(
                _FETCHES,
                "        return host_ids\n",
                "        self.num_blocks -= len(host_ids)\n        return host_ids\n",
            ),
        ),
        tested("tests/scheduler/storage/test_fetches.py"),
    ),
    Mutant(
        "lost-answers-awaited",
        "a request waits for ever for an answer that was lost",
        (Patch(_PREFETCHES, "for job_id in self._reading.lost(now):", "for job_id in ():"),),
        tested(f"{_TESTS}::test_one_answer_that_is_lost_hangs_neither_its_request_nor_those_with_its_prefix"),
    ),
    Mutant(
        "silence-awaited",
        "every request waits for storage that does not answer",
        (Patch(_READING, "if self._silence < STALL_SECONDS:", "if True:"),),
        tested(f"{_TESTS}::test_storage_that_hangs_holds_up_one_request_and_no_other"),
    ),
    Mutant(
        "standing-still-is-silence",
        "storage is given up where the engine itself stood still",
        (Patch(_READING, "min(now - self._looked, _LONGEST_LOOK)", "now - self._looked"),),
        tested(f"{_TESTS}::test_an_engine_that_stood_still_itself_goes_on_waiting_for_storage"),
    ),
    Mutant(
        "called-off-is-an-answer",
        "storage that does not answer is waited for as long as others are called off",
        (
            Patch(
                _READING,
                "        if was_answered:\n            self._silence",
                "        if True:\n            self._silence",
            ),
        ),
        tested(f"{_TESTS}::test_what_was_called_off_is_no_answer_of_storage"),
    ),
    Mutant(
        "silence-that-begins-anew",
        "each request waits for storage that is dead, once those in front of it are called off",
        (
            Patch(
                _READING, "            self._looked = now  #", "            self._silence, self._looked = 0.0, now  #"
            ),
        ),
        tested(f"{_TESTS}::test_storage_that_is_dead_holds_requests_up_for_two_seconds_in_all"),
    ),
    Mutant(
        "called-off-all-the-same",
        "a fetch that is wanted again is called off",
        (Patch(_FOLLOWERS, "        if job_id in self._untold:\n", "        if False:\n"),),
        tested(f"{_TESTS}::test_a_fetch_that_is_wanted_again_before_ranks_were_told_is_not_called_off"),
    ),
    Mutant(
        "called-off-for-all",
        "who waited for another's fetch that was called off is never looked up again",
        (Patch(_PREFETCHES, "or (fetch.job.job_id in prefetch.coalesced and not fetch.ok)", "or False"),),
        tested(f"{_TESTS}::test_a_fetch_that_was_called_off_is_asked_for_again_by_who_rides_on_it"),
    ),
    Mutant(
        "fetched-in-silence",
        "routers do not hear of blocks that were fetched",
        (
            Patch(
                _FETCHES,
                "        if filled:\n            self._shared.events.add(",
                "        if False:\n            self._shared.events.add(",
            ),
        ),
        tested(f"{_TESTS}::test_routers_hear_of_fetched_blocks"),
    ),
    Mutant(
        "failed-fetch-kept",
        "blocks whose fetch has failed are matched",
        (
            Patch(
                _FETCHES,
                "            self._host.discard(host_ids)\n            return\n",
                "            self._host.fill(host_ids)\n            return\n",
            ),
        ),
        tested(_TESTS),
    ),
    Mutant(
        "names-outlive-resets",
        "what storage has from before a reset is found behind it",
        (
            Patch(
                "kv_connector/scheduler/names.py",
                "self._salt = adopt_hash(self._salt, np.random.default_rng().bytes(32))",
                "pass",
            ),
        ),
        tested(f"{_TESTS}::test_after_a_reset_nothing_of_before_is_found"),
    ),
    Mutant(
        "room-unlocked",
        "two processes make room in a folder at once",
        (
            Patch(
                f"{_FILESYSTEM}/layout.py",
                "return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
                "return fcntl.flock(descriptor, fcntl.LOCK_UN)",
            ),
        ),
        tested("tests/storage/filesystem/test_backend.py::test_nobody_else_makes_room_or_publishes_meanwhile"),
    ),
    Mutant(
        "folder-never-left",
        "a folder of which somebody has deleted all files stores nothing any more, and no engine starts with it",
        (Patch(f"{_FILESYSTEM}/layout.py", "return name in _OURS and ", "return False and "),),
        tested(f"{_FOREIGN}::test_who_deletes_all_files_leaves_a_folder_that_can_be_used"),
    ),
    Mutant(
        "folder-taken-from-others",
        "a folder with files of somebody else in folders of our names is taken for ours",
        (Patch(f"{_FILESYSTEM}/layout.py", " and not os.listdir(path)", ""),),
        tested(f"{_FOREIGN}::test_empty_folders_of_our_names_do_not_make_ours_what_lies_beside_them"),
    ),
    Mutant(
        "packs-named-by-keys",
        "two packs of the same blocks have one name, whatever their bytes",
        (
            Patch(
                f"{_FILESYSTEM}/packs.py",
                "return pack_name(self.identity, self.keys, self.checksums)",
                "return pack_name(self.identity, self.keys)",
            ),
        ),
        tested(
            "tests/storage/filesystem/test_writers.py",
            f"{_SIMULATED_DISK}::test_good_blocks_are_not_called_damaged_where_results_differ_in_their_last_bits",
        ),
    ),
    Mutant(
        "own-records-read",
        "a pack that was removed comes back with our own record of it",
        (
            Patch(
                f"{_FILESYSTEM}/journal.py",
                "        self._end += len(text)\n        self._num_records",
                "        self._num_records",
            ),
        ),
        tested(f"{_SIMULATED_DISK}::test_what_was_stored_is_there", "tests/storage/filesystem/test_journal.py"),
    ),
    Mutant(
        "flip-costs-a-pack",
        "one damaged block takes all of its pack with it",
        (
            Patch(
                f"{_FILESYSTEM}/reads.py",
                "if header is not None and self._folder.catalog.drop(pack, places):",
                "if False:",
            ),
        ),
        tested("tests/storage/filesystem/test_backend.py::test_damaged_and_foreign_files_are_misses"),
    ),
    Mutant(
        "damage-of-the-one-before",
        "a good pack is deleted for what was read of a damaged one of its name",
        (
            Patch(
                f"{_FILESYSTEM}/reads.py",
                "if self._folder.catalog.text(pack) is None:  # another",
                "if False:  # another",
            ),
        ),
        tested(
            f"{_DAMAGE}::test_a_pack_that_was_stored_again_meanwhile_is_not_deleted_for_the_damage_of_the_one_before"
        ),
    ),
    Mutant(
        "headless-is-kept",
        "a pack whose header is damaged too keeps its other blocks from being stored again",
        (Patch(f"{_FILESYSTEM}/reads.py", "if header is not None and self._folder", "if self._folder"),),
        tested(f"{_DAMAGE}::test_a_pack_whose_header_is_damaged_too_goes_as_a_whole"),
    ),
    Mutant(
        "stale-stays-open",
        "a pack that could not be read is never opened anew while batches follow each other",
        (Patch(f"{_FILESYSTEM}/folder.py", "        self.opened.drop(name)\n", ""),),
        tested(f"{_DAMAGE}::test_a_pack_that_could_not_be_read_is_opened_anew"),
    ),
    Mutant(
        "dying-disk-asked",
        "a disk that does not give a pack is asked for every piece of it",
        (
            Patch(f"{_FILESYSTEM}/catalog.py", "name, num_bytes, used_ns, None\n", "name, num_bytes, used_ns, text\n"),
            Patch(f"{_FILESYSTEM}/catalog.py", "self._packs.pop(number)[1]", "self._packs[number][1]"),
        ),
        tested(f"{_DAMAGE}::test_what_a_disk_does_not_give_is_asked_for_once_in_a_batch"),
    ),
    Mutant(
        "unreadable-for-ever",
        "blocks that the disk does not give count as stored, and are not stored again",
        (
            Patch(
                f"{_FILESYSTEM}/reads.py",
                'self._folder.missed(pack.name)\n        self._storage.note_fault(f"cannot read',
                'self._folder.opened.drop(pack.name)\n        self._storage.note_fault(f"cannot read',
            ),
        ),
        tested("tests/storage/filesystem/test_foreign.py"),
    ),
    Mutant(
        "room-for-what-never-came",
        "good packs make room for those that the journal has told of and that never came",
        (
            Patch(
                f"{_FILESYSTEM}/folder.py", "                self.contents.look_at_told()\n", "                pass\n"
            ),
        ),
        tested("tests/storage/filesystem/test_journal.py"),
    ),
    Mutant(
        "one-object-closes-the-bucket",
        "an object that may not be read counts as a store that refuses everything",
        (
            Patch(
                _S3,
                "        code = _found(_CODE, error)\n        if code in _FIXES:\n            raise error\n",
                "        code = _found(_CODE, error)\n        raise error\n",
            ),
        ),
        tested(_S3_FAULTS),
    ),
    Mutant(
        "refused-is-stored",
        "an object that may not be read counts as stored, and is not written again",
        (Patch(_S3, "            self._shunned[name] = None\n", "            pass\n"),),
        tested(_S3_FAULTS),
    ),
    Mutant(
        "folders-of-others-taken",
        "a folder with files of somebody else becomes ours",
        (Patch(f"{_FILESYSTEM}/layout.py", "if others and not self.is_ours():", "if False:"),),
        tested("tests/storage/filesystem/test_foreign.py"),
    ),
    Mutant(
        "mark-of-others",
        "a folder is ours where a link of our mark's name points at any file",
        (Patch(f"{_FILESYSTEM}/layout.py", "S_ISREG(os.lstat(self._marker)", "S_ISREG(os.stat(self._marker)"),),
        tested(f"{_FOREIGN}::test_a_mark_that_is_a_link_does_not_make_a_folder_ours"),
    ),
    Mutant(
        "mark-through-a-link",
        "our mark is written over the file of a user that a link points at",
        (Patch(f"{_FILESYSTEM}/layout.py", "O_WRONLY | os.O_CREAT | os.O_NOFOLLOW", "O_WRONLY | os.O_CREAT"),),
        tested(f"{_FOREIGN}::test_the_mark_is_not_written_through_a_link"),
    ),
    Mutant(
        "renamed-untold",
        "packs lie there before the journal tells of them, so that a kill leaves what nobody counts",
        (
            Patch(
                f"{_FILESYSTEM}/folder.py",
                "            self._evicting(partial(self.contents.tell, records)",
                "            done = [self._rename(*pair) for pair in zip([file for file, _ in files], records)]\n"
                "            self._evicting(partial(self.contents.tell, records)",
            ),
            Patch(
                f"{_FILESYSTEM}/folder.py",
                "return [self._rename(file, record) for (file, _), record in zip(files, records, strict=True)]",
                "return done",
            ),
        ),
        tested("tests/storage/filesystem/test_folder.py::test_nothing_lies_there_that_the_journal_has_not_told_of"),
    ),
    Mutant(
        "journal-goes-on",
        "a journal that was written anew is read on from where the one before ended",
        (Patch(f"{_FILESYSTEM}/journal.py", "if head != self._head or size", "if not self._head or size"),),
        tested(f"{_JOURNAL}::test_a_file_that_was_replaced_is_read_from_its_beginning"),
    ),
    Mutant(
        "journal-cut-unseen",
        "a journal that lost its end is read on from behind it",
        (Patch(f"{_FILESYSTEM}/journal.py", "if head != self._head or size < self._end:", "if head != self._head:"),),
        tested(f"{_JOURNAL}::test_a_file_that_lost_its_end_is_read_from_its_beginning"),
    ),
    Mutant(
        "offered-twice",
        "a pack that came back is in line twice",
        (Patch(f"{_FILESYSTEM}/catalog.py", "number = self._next_number\n", "number = len(self._numbers)\n"),),
        tested("tests/storage/filesystem/test_catalog.py"),
    ),
    Mutant(
        "used-and-first-to-go",
        "a pack that was read since it came in line goes as if it had not been",
        (Patch(f"{_FILESYSTEM}/catalog.py", "used_ns == queued_ns:", "used_ns >= queued_ns:"),),
        tested("tests/storage/filesystem/test_catalog.py"),
    ),
    Mutant(
        "gone-is-kept",
        "packs that are not there any more are known as long as no new one lies there",
        (Patch(f"{_FILESYSTEM}/catalog.py", "if len(names) - len(new) < len(", "if len(new) > len("),),
        tested("tests/storage/filesystem/test_catalog.py"),
    ),
    Mutant(
        "folders-of-others-tidied",
        "the command line deletes packs of somebody else",
        (
            Patch(
                f"{_FILESYSTEM}/layout.py",
                "        if not self.is_ours():\n            os.stat(",
                "        if False:\n            os.stat(",
            ),
        ),
        tested("tests/storage/filesystem/test_foreign.py"),
    ),
    Mutant(
        "links-followed",
        "a pack that is a link is read, and its target believed",
        (Patch(f"{_FILESYSTEM}/packs.py", "flags | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_NONBLOCK"),),
        tested("tests/storage/filesystem/test_journal.py"),
    ),
    Mutant(
        "the-living-are-dead",
        "files that others write at the time are deleted",
        (
            Patch(
                f"{_FILESYSTEM}/temporaries.py",
                "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        os.unlink(path)\n",
                "        os.unlink(path)\n",
            ),
        ),
        tested(
            "tests/storage/filesystem/test_backend.py::test_temporary_files_of_the_dead_go_and_those_of_the_living_count"
        ),
    ),
    Mutant(
        "closed-while-read",
        "a pack is closed while somebody reads it, so that its descriptor may be another file's",
        (
            Patch(
                f"{_FILESYSTEM}/descriptors.py",
                "[pack for pack in self._open.values() if not pack.num_users]",
                "list(self._open.values())",
            ),
        ),
        tested("tests/storage/filesystem/test_descriptors.py"),
    ),
    Mutant(
        "open-for-ever",
        "packs that were read stay open, and take room when others have deleted them",
        (
            Patch(
                f"{_FILESYSTEM}/descriptors.py",
                "idle = self._take_idle(0) if not self._num_batches else []",
                "idle = self._take_idle(MOST_OPEN)",
            ),
        ),
        tested("tests/storage/filesystem/test_descriptors.py::test_reads_leave_nothing_open", _SIMULATED_DISK),
    ),
    Mutant(
        "undeleted-is-uncounted",
        "a pack that cannot be deleted takes no room, and is not found",
        (Patch(f"{_FILESYSTEM}/folder.py", "            return None\n", "            pass\n"),),
        tested(f"{_BACKEND}::test_what_cannot_be_deleted_to_make_room_is_found_as_before"),
    ),
    Mutant(
        "undeleted-is-hidden",
        "where packs cannot be deleted to make room none of them is found any more",
        (
            Patch(
                f"{_FILESYSTEM}/folder.py",
                "                stuck.append(oldest)\n",
                "                stuck.append(oldest)\n                self.catalog.hide(pack)\n",
            ),
        ),
        tested(f"{_BACKEND}::test_what_cannot_be_deleted_to_make_room_is_found_as_before"),
    ),
    Mutant(
        "missed-is-gone",
        "a pack that is missed while the disk is away, or before it is renamed, is never counted again",
        (Patch(f"{_FILESYSTEM}/folder.py", "            self.contents.look_again()\n", ""),),
        tested("tests/storage/filesystem/test_folder.py"),
    ),
    Mutant(
        "the-future-is-believed",
        "what a clock that was ahead once has written is kept for ever",
        (
            Patch(
                f"{_FILESYSTEM}/folder.py",
                "return used_ns if used_ns <= self.catalog.now() + SKEW_NS else known_ns",
                "return used_ns",
            ),
        ),
        tested("tests/storage/filesystem/test_clocks.py"),
    ),
    Mutant(
        "records-of-the-future",
        "packs count as used when their record says, although those behind it are older",
        (Patch(f"{_FILESYSTEM}/contents.py", "limit = min(limit - 1, time_ns)", "limit = time_ns"),),
        tested("tests/storage/filesystem/test_clocks.py"),
    ),
    Mutant(
        "set-back-and-lost",
        "a clock that is set back makes what is used next the first to go",
        (
            Patch(
                f"{_FILESYSTEM}/catalog.py",
                "                self._bring_back(now)\n",
                "                self._last_ns = now\n",
            ),
        ),
        tested("tests/storage/filesystem/test_clocks.py"),
    ),
    Mutant(
        "fetched-in-part",
        "a block that is missing in a fetch is not told of",
        (
            Patch(
                "kv_connector/storage/jobs.py",
                "for block_id, is_moved in pairs if not is_moved",
                "for block_id, _ in ()",
            ),
        ),
        tested("tests/storage/test_jobs.py"),
    ),
    Mutant(
        "missing-on-one-rank",
        "a block that one rank could not fetch is matched",
        (
            Patch(
                "kv_connector/scheduler/ledger.py",
                "self._open[job_id].missing |= frozenset(",
                "self._open[job_id].missing &= frozenset(",
            ),
        ),
        tested(f"{_TESTS}::test_a_block_that_one_rank_could_not_fetch_is_lost_and_no_other"),
    ),
    Mutant(
        "missing-filled",
        "a block that could not be fetched is matched",
        (
            Patch(
                _FETCHES,
                "host_ids = [block_id for block_id in host_ids if block_id not in ended.missing]",
                "pass",
            ),
            Patch(_FETCHES, "self._host.discard(sorted(ended.missing))", "pass"),
        ),
        tested(f"{_TESTS}::test_a_block_that_one_rank_could_not_fetch_is_lost_and_no_other"),
    ),
    Mutant(
        "lost-blocks-written",
        "a block that the host has let go of as it waited is written",
        (
            Patch(
                _BACKUPS,
                "if self._host.first_not_resident(group) is None:\n                live += group",
                "if True:\n                live += group",
            ),
        ),
        tested(
            "tests/scheduler/storage/test_backups.py::test_what_could_not_be_loaded_is_not_written_though_it_waits",
        ),
    ),
    Mutant(
        "fetched-is-written",
        "what a fetch has brought in the place of unwritten blocks is written once more, and those are not counted",
        (
            Patch(
                _BACKUPS,
                'which has them."""\n        self._note_replaced(host_ids)\n',
                'which has them."""\n',
            ),
        ),
        tested(
            "tests/scheduler/storage/test_backups.py"
            "::test_what_a_fetch_takes_the_place_of_was_not_written_and_what_it_brings_need_not_be"
        ),
    ),
    Mutant(
        "own-thread-timed-out",
        "a batch is lost that has waited for a thread of its own process, where another one is within for a moment",
        (Patch(f"{_FILESYSTEM}/layout.py", "                self._within = seconds, since\n", ""),),
        tested(_LOCK),
    ),
    Mutant(
        "own-time-not-counted",
        "time in which a thread of this process was within counts when it has left",
        (Patch(f"{_FILESYSTEM}/layout.py", "seconds + time.monotonic() - since, None", "seconds, None"),),
        tested(_LOCK),
    ),
    Mutant(
        "stopped-neighbour-waited-for-in-turn",
        "of threads that wait for another process some wait for as long as any come",
        (Patch(f"{_FILESYSTEM}/layout.py", "if self._seconds_outside() > deadline:", "if False:"),),
        tested(_LOCK),
    ),
    Mutant(
        "full-disk-emptied",
        "what is stored is evicted pack by pack on a disk whose room somebody else takes",
        (Patch(f"{_FILESYSTEM}/folder.py", "            self._may_evict = False\n", ""),),
        tested(f"{_BACKEND}::test_where_eviction_does_not_help_on_a_full_disk_the_writes_are_lost_and_nothing_else"),
    ),
    Mutant(
        "full-disk-given-up",
        "a disk that was full of others' files once keeps what it has for good",
        (
            Patch(
                f"{_FILESYSTEM}/folder.py",
                "        self._may_evict = True\n        return result",
                "        return result",
            ),
        ),
        tested("tests/storage/filesystem/test_disks.py::test_on_a_disk_that_is_full_what_was_used_longest_ago_goes"),
    ),
    Mutant(
        "full-disk-without-index",
        "a disk with room for a pack, and none for what the index says of it, takes nothing more",
        (
            Patch(
                f"{_FILESYSTEM}/folder.py",
                "self._evicting(partial(self.contents.tell, records), ",
                "(lambda *_: self.contents.tell(records))(",
            ),
        ),
        tested(
            "tests/storage/filesystem/test_disks.py::test_a_disk_with_room_for_a_pack_and_not_for_the_index_is_full"
        ),
    ),
    Mutant(
        "full-disk-without-a-new-index",
        "on a full disk room for a new index is made pack by pack, and what is stored meanwhile is lost",
        (Patch(f"{_FILESYSTEM}/folder.py", "size = self.contents.journal_bytes() + sum(", "size = sum("),),
        tested(
            "tests/storage/filesystem/test_disks.py::test_a_full_disk_has_room_for_an_index_that_must_be_written_anew"
        ),
    ),
)
