"""Which cores and which thousandths of which GPU a task is granted, and what is free after release."""

from __future__ import annotations

import pytest

from builders import a_node, a_task
from hodei.engine.device_slots import DeviceSlots, needs_devices
from hodei.model.node import Grant, Socket

TWO_SOCKETS = (Socket((0, 1, 2, 3), (0, 1)), Socket((4, 5, 6, 7), (2, 3)))


def _parts(gpu="4", sockets=TWO_SOCKETS, taken=(), **fields):
    parts = DeviceSlots(a_node("n1", 8, gpu=gpu, sockets=sockets, **fields))
    for grant in taken:
        parts.take(grant)
    return parts


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({}, False),
        ({"gpu": "0.5"}, True),
        ({"binding": "cores"}, True),
        ({"binding": "numa"}, True),
        ({"gpu": "0"}, False),
    ],
    ids=["only amounts", "a share of a GPU", "cores of its own", "one socket", "no GPU at all"],
)
def test_only_gpus_and_bound_cores_are_given_by_number(fields, wants):
    assert needs_devices(a_task(**fields)) is wants


@pytest.mark.parametrize(
    ("asked", "taken", "given"),
    [
        ("0.5", (), ((0, 500),)),
        ("0.5", (Grant((), ((2, 400),)),), ((2, 500),)),
        ("0.7", (Grant((), ((2, 400),)),), ((0, 700),)),
        ("2", (), ((0, 1000), (1, 1000))),
        ("2", (Grant((), ((0, 100),)),), ((2, 1000), (3, 1000))),
        ("3", (Grant((), ((0, 100),)),), ((1, 1000), (2, 1000), (3, 1000))),
        ("1.5", (Grant((), ((3, 500),)),), ((2, 1000), (3, 500))),
        ("4", (Grant((), ((0, 1),)),), None),
        ("0.6", tuple(Grant((), ((gpu, 500),)) for gpu in range(4)), None),
    ],
    ids=[
        "a share of the first", "the tightest that fits", "the tightest is too full", "whole ones of one socket",
        "of the socket that has enough", "of several sockets if it must be", "whole ones first, the rest of another",
        "a GPU that is touched is not whole", "enough in sum, not in one piece",
    ],
)  # fmt: skip
def test_gpus_are_given_by_number(asked, taken, given):
    found = _parts(taken=taken).find(a_task(gpu=asked))
    assert (found.gpus if found is not None else None) == given


@pytest.mark.parametrize(
    ("wanted", "gpu"), [(3, 3), (1, 2), (9, 2)], ids=["it has room", "it is too full", "there is no such GPU"]
)
def test_a_fraction_is_taken_from_the_chosen_gpu_if_it_has_capacity(wanted, gpu):
    parts = _parts(taken=(Grant((), ((1, 700),)), Grant((), ((2, 400),))))
    assert parts.find(a_task(gpu="0.5"), wanted) == Grant((), ((gpu, 500),))


def test_whole_gpus_and_the_fraction_are_on_different_gpus_even_with_overcommit():
    parts = _parts(gpu="1", sockets=(), overcommit_percent={"gpu": 150})
    assert parts.find(a_task(gpu="1.5")) is None
    assert parts.find(a_task(gpu="1")) == Grant((), ((0, 1000),))


@pytest.mark.parametrize(
    ("cpu", "binding", "cpus"),
    [
        ("2", "cores", (4, 5)),
        ("1500m", "cores", (4, 5)),
        ("4", "cores", (0, 1, 3, 4)),
        ("3", "numa", (0, 1, 3)),
        ("6", "cores", None),
        ("4", "numa", None),
        ("2", "", ()),
    ],
    ids=[
        "of the tightest socket", "rounded up to whole cores", "of both, most of the larger", "of one socket",
        "there are not so many", "no socket has so many", "none if it floats",
    ],
)  # fmt: skip
def test_cores_are_given_of_as_few_sockets_as_possible(cpu, binding, cpus):
    found = _parts(taken=(Grant((2,)), Grant((6, 7)))).find(a_task(cpu=cpu, binding=binding))
    assert (found.cpus if found is not None else None) == cpus


def test_all_that_a_numa_task_gets_is_of_one_socket():
    parts = _parts(taken=(Grant((), ((0, 1000), (1, 1000))),))
    assert parts.find(a_task(cpu="2", gpu="1", binding="numa")) == Grant((4, 5), ((2, 1000),))
    assert parts.find(a_task(cpu="2", gpu="3", binding="numa")) is None


def test_what_is_given_back_is_free_again():
    node = a_node("n1", 8, gpu="4", sockets=TWO_SOCKETS)
    parts, untouched = DeviceSlots(node), DeviceSlots(node)
    for task in (a_task(cpu="3", gpu="2.5", binding="cores"), a_task(gpu="0.2"), a_task(cpu="2", binding="numa")):
        grant = parts.find(task)
        parts.take(grant)
        assert (parts.cores, parts.gpus) != (untouched.cores, untouched.gpus)
        parts.give(grant, node)
    assert (parts.cores, parts.gpus, parts.sizes) == (untouched.cores, untouched.gpus, {})


def test_holders_of_fractions_and_of_whole_gpus_are_counted():
    parts = _parts(
        taken=(Grant((), ((0, 300),)), Grant((), ((0, 300),)), Grant((), ((1, 1000), (2, 1000))), Grant((5,)))
    )
    assert parts.sizes == {0: 2, 2: 1}
    twin = parts.copy()
    twin.give(Grant((), ((0, 300),)), a_node("n1", 8, gpu="4", sockets=TWO_SOCKETS))
    assert (parts.sizes, twin.sizes) == ({0: 2, 2: 1}, {0: 1, 2: 1})
