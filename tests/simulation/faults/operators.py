"""Faults of what operators look at and steer an engine with: the admin endpoint, recorded traces, observers."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_SERVER = "kv_connector/admin/server.py"
_SERVER_TESTS = "tests/admin/test_server.py"
_RECORDER = "kv_connector/replay/recorder.py"
_RECORDER_TESTS = "tests/replay/test_recorder.py"

OPERATORS: tuple[Mutant, ...] = (
    Mutant(
        "admin-trickle",
        "a client that says a byte again and again keeps its place for ever",
        (
            Patch(
                _SERVER,
                "        left = self._deadline - self._clock()\n",
                "        left = max(1e-3, self._deadline - self._clock())\n",
            ),
        ),
        tested(f"{_SERVER_TESTS}::test_a_client_that_says_a_little_again_and_again_is_left"),
    ),
    Mutant(
        "admin-time-of-each-part",
        "each part of a request may take as long as all of it",
        (Patch(_SERVER, "settimeout(left)", "settimeout(10.0)"),),
        tested(f"{_SERVER_TESTS}::test_a_client_that_says_a_little_again_and_again_is_left"),
    ),
    Mutant(
        "admin-no-thread",
        "each connection for which there was no thread costs a place for ever",
        (
            Patch(
                _SERVER,
                "            connection.close()\n            slots.release()\n            raise\n",
                "            raise\n",
            ),
        ),
        tested(f"{_SERVER_TESTS}::test_a_process_without_threads_left_serves_again_once_it_has_some"),
    ),
    Mutant(
        "admin-log-filled",
        "who tries tokens fills the log",
        (Patch(_SERVER, "            self._silent_until = now + _LOG_SECONDS\n", ""),),
        tested(f"{_SERVER_TESTS}::test_who_tries_many_tokens_does_not_fill_the_log"),
    ),
    Mutant(
        "admin-folder-locked",
        "who locks the folder of a socket holds an engine's start up for ever",
        (
            Patch(
                "kv_connector/admin/listeners.py",
                "for _ in range(_LOCK_TRIES):",
                "for _ in range(10):",
            ),
            Patch(
                "kv_connector/admin/listeners.py",
                '            raise OSError(errno.EDEADLK, "another program holds a lock on its folder and keeps it")\n',
                "            pass\n",
            ),
        ),
        tested("tests/admin/test_listeners.py::test_who_keeps_the_folder_locked_holds_no_engine_up"),
    ),
    Mutant(
        "trace-over-anything",
        "a recording goes on in a file that is no trace, whose last line it cuts off",
        (Patch(_RECORDER, "    elif not _BEGINS.startswith(", "    elif False and not _BEGINS.startswith("),),
        tested(f"{_RECORDER_TESTS}::test_a_file_that_is_no_trace_is_left_as_it_is"),
    ),
    Mutant(
        "trace-for-all",
        "a recording goes on in a file that others may read",
        (Patch(_RECORDER, "found.st_mode & _OTHERS", "found.st_mode & 0"),),
        tested(f"{_RECORDER_TESTS}::test_a_trace_that_others_may_read_is_not_written_on"),
    ),
    Mutant(
        "trace-lost-at-the-end",
        "what was recorded last is lost when a forked engine ends",
        (
            Patch(
                _RECORDER,
                "Finalize(self, _close, (self._queue, thread), exitpriority=10)",
                "__import__('weakref').finalize(self, _close, self._queue, thread)",
            ),
        ),
        tested(f"{_RECORDER_TESTS}::test_all_is_written_when_a_process_ends_that_never_closed_it"),
    ),
    Mutant(
        "trace-without-header",
        "behind a file that was emptied blocks are of another size",
        (Patch(_RECORDER, "self._begin is None or not found.st_size, found", "self._begin is None, found"),),
        tested(f"{_RECORDER_TESTS}::test_who_empties_the_file_finds_a_whole_trace_behind_it"),
    ),
    Mutant(
        "trace-torn",
        "a trace whose engine was killed cannot be replayed",
        (Patch("kv_connector/replay/trace.py", "if rest and not (lines and _is_torn(rest)):", "if rest:"),),
        tested(f"{_RECORDER_TESTS}::test_a_trace_whose_engine_was_killed_can_be_replayed"),
    ),
    Mutant(
        "unrecorded-while-a-copy-hangs",
        "requests that are served while a copy hangs are missing in traces that others replay",
        (Patch("kv_connector/scheduler/half.py", "            self._observers.arrived(request)\n", ""),),
        tested("tests/scheduler/test_observers.py::test_what_is_served_while_a_copy_hangs_is_recorded"),
    ),
    Mutant(
        "observer-unguarded",
        "an exporter of traces that raises ends the engine",
        (
            Patch(
                "kv_connector/build.py",
                "[GuardedObserver(observer) for observer in observers]",
                "observers",
            ),
        ),
        tested("tests/scheduler/test_recording.py::test_an_observer_that_raises_breaks_no_engine"),
    ),
)
