"""Which cores and which thousandths of which GPU a task is granted, and what is free after release."""

from __future__ import annotations

import pytest

from builders import a_node, a_task
from hodei.engine.device_slots import DeviceSlots, needs_devices
from hodei.model.node import Grant, Socket

TWO_SOCKETS = (Socket((0, 1, 2, 3), (0, 1)), Socket((4, 5, 6, 7), (2, 3)))


def _slots(gpu="4", sockets=TWO_SOCKETS, taken=(), **fields):
    slots = DeviceSlots(a_node("n1", 8, gpu=gpu, sockets=sockets, **fields))
    for grant in taken:
        slots.take(grant)
    return slots


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, False),
        ({"gpu": "0.5"}, True),
        ({"binding": "cores"}, True),
        ({"binding": "numa"}, True),
        ({"gpu": "0"}, False),
    ],
    ids=["only amounts", "a share of a GPU", "bound cores", "one socket", "no GPU"],
)
def test_only_gpus_and_bound_cores_are_granted_by_number(fields, needs):
    assert needs_devices(a_task(**fields)) is needs


@pytest.mark.parametrize(
    ("requested", "taken", "granted"),
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
        "a share of the first", "the tightest that fits", "the tightest is too full", "whole GPUs of one socket",
        "of the socket that has enough", "of several sockets if necessary", "whole GPUs first, the rest of another",
        "a shared GPU is not whole", "enough in sum, not on one GPU",
    ],
)  # fmt: skip
def test_gpus_are_granted_by_number(requested, taken, granted):
    found = _slots(taken=taken).find(a_task(gpu=requested))
    assert (found.gpus if found is not None else None) == granted


@pytest.mark.parametrize(
    ("chosen", "gpu"), [(3, 3), (1, 2), (9, 2)], ids=["it fits", "it is too full", "there is no such GPU"]
)
def test_a_fraction_is_taken_from_the_chosen_gpu_if_it_has_capacity(chosen, gpu):
    slots = _slots(taken=(Grant((), ((1, 700),)), Grant((), ((2, 400),))))
    assert slots.find(a_task(gpu="0.5"), chosen) == Grant((), ((gpu, 500),))


def test_whole_gpus_and_the_fraction_are_on_different_gpus_even_with_overcommit():
    slots = _slots(gpu="1", sockets=(), overcommit_percent={"gpu": 150})
    assert slots.find(a_task(gpu="1.5")) is None
    assert slots.find(a_task(gpu="1")) == Grant((), ((0, 1000),))


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
        "more than the node has", "more than a socket has", "none without binding",
    ],
)  # fmt: skip
def test_cores_are_granted_from_as_few_sockets_as_possible(cpu, binding, cpus):
    found = _slots(taken=(Grant((2,)), Grant((6, 7)))).find(a_task(cpu=cpu, binding=binding))
    assert (found.cpus if found is not None else None) == cpus


def test_the_cores_and_gpus_of_a_numa_task_are_of_one_socket():
    slots = _slots(taken=(Grant((), ((0, 1000), (1, 1000))),))
    assert slots.find(a_task(cpu="2", gpu="1", binding="numa")) == Grant((4, 5), ((2, 1000),))
    assert slots.find(a_task(cpu="2", gpu="3", binding="numa")) is None


def test_released_devices_are_free_again():
    node = a_node("n1", 8, gpu="4", sockets=TWO_SOCKETS)
    slots, untouched = DeviceSlots(node), DeviceSlots(node)
    for task in (a_task(cpu="3", gpu="2.5", binding="cores"), a_task(gpu="0.2"), a_task(cpu="2", binding="numa")):
        grant = slots.find(task)
        slots.take(grant)
        assert (slots.cores, slots.gpus) != (untouched.cores, untouched.gpus)
        slots.give(grant, node)
    assert (slots.cores, slots.gpus, slots.sizes) == (untouched.cores, untouched.gpus, {})


def test_holders_of_fractions_and_of_whole_gpus_are_counted():
    slots = _slots(
        taken=(Grant((), ((0, 300),)), Grant((), ((0, 300),)), Grant((), ((1, 1000), (2, 1000))), Grant((5,)))
    )
    assert slots.sizes == {0: 2, 2: 1}
    copy = slots.copy()
    copy.give(Grant((), ((0, 300),)), a_node("n1", 8, gpu="4", sockets=TWO_SOCKETS))
    assert (slots.sizes, copy.sizes) == ({0: 2, 2: 1}, {0: 1, 2: 1})
