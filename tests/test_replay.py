"""The allocator's history, played again from made-up events: sizes, lives and peaks."""

from typing import Any

from sweep.worker.explain.replay import play

MIB = 1 << 20


def segment(blocks: list[tuple[int, int, str]], size: int = 20 * MIB, **changes: Any) -> dict[str, Any]:
    content = {"address": 0, "total_size": size, "segment_type": "large", "is_expandable": False}
    return content | {"blocks": [{"address": a, "size": s, "state": state} for a, s, state in blocks]} | changes


def event(action: str, address: int, size: int, text: str = "") -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "user_metadata": text, "frames": []}


def test_requests_are_rounded_up_to_512_bytes() -> None:
    history = play([segment([(0, 20 * MIB, "inactive")])], [event("alloc", 0, 2 * MIB + 1)])
    assert history.allocated == [2 * MIB + 512]


def test_a_rest_of_at_most_a_mebibyte_stays_with_the_block() -> None:
    held = (3 * MIB, 17 * MIB, "active_allocated")
    history = play([segment([(0, 3 * MIB, "inactive"), held])], [event("alloc", 0, 2 * MIB)])
    assert history.lives[-1].size == 3 * MIB
    history = play([segment([(0, 3 * MIB, "inactive"), held])], [event("alloc", 0, 2 * MIB - 512)])
    assert history.lives[-1].size == 2 * MIB - 512


def test_small_and_expandable_segments_split_off_every_rest() -> None:
    for changes in ({"segment_type": "small"}, {"is_expandable": True}):
        history = play([segment([(0, 2 * MIB, "inactive")], 2 * MIB, **changes)], [event("alloc", 0, MIB + 512)])
        assert history.lives[-1].size == MIB + 512


def test_a_block_ends_where_its_release_is_asked_for_and_is_taken_until_that_is_done() -> None:
    trace = [
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 4 * MIB),
        event("alloc", 4 * MIB, 4 * MIB),
        event("free_requested", 4 * MIB, 4 * MIB),
        event("free_requested", 0, 4 * MIB),
        event("free_completed", 0, 4 * MIB),
        event("alloc", 0, 4 * MIB - 1024),  # the next block is not free yet: a rest of 1024 bytes is not split off
    ]
    history = play([], trace)
    assert [one // MIB for one in history.allocated] == [0, 4, 8, 4, 0, 0, 4]
    assert history.peak_time == 2
    assert [(life.start, life.end) for life in history.lives] == [(1, 4), (2, 3), (6, None)]
    assert history.reserved[-1] == 20 * MIB


def test_marks_say_when_and_notes_say_what() -> None:
    trace = [event("annotate", 0, 0, "@forward 0"), event("annotate", 0, 0, "7"), event("free_requested", 0, 0)]
    history = play([segment([(0, 20 * MIB, "active_allocated")])], trace)
    assert history.marks == [(0, "forward 0")]
    assert history.lives[0].notes == [(1, "7")]
    assert history.lives[0].lives_at(1)
    assert not history.lives[0].lives_at(2)
