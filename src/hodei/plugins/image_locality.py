"""Images: nodes that hold a member's images already are better, by how much need not be fetched.

Kubernetes' formula: the bytes of each image times the share of the nodes that hold it (so that one node with a rare image
does not draw everything to itself), on a line from 23 MB (no points) to 1 GB for each image (all points).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from hodei.engine.nodes import Ints, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.node import Node

_MB = 1024 * 1024
_LEAST, _MOST_EACH = 23 * _MB, 1000 * _MB
_POINT = MAX_SCORE // 100


class ImageLocality:
    name = "image_locality"
    reads: Reads = "static"

    def key(self, member: Member) -> Hashable:
        return member.task.images

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        images = member.task.images
        if not images:
            return None
        whole = nodes.table.view()
        total = nodes.zeros()
        for image in dict.fromkeys(images):
            name = normalized(image)
            held = whole.by(("image", name), lambda node, name=name: _size(name, node)).numbers(int)  # type: ignore[misc]
            holders = int((held > 0).sum())
            # In floating point as there: the share first, then its part of the size, cut to whole bytes.
            spread = holders / max(len(held), 1)
            total = total + (held * spread).astype("int64")[nodes.rows] * images.count(image)
        most = _MOST_EACH * len(images)
        inside = nodes.lower(nodes.higher(total, _LEAST), most)
        return (inside - _LEAST) * 100 // (most - _LEAST) * _POINT


def _size(name: str, node: Node) -> int:
    images: Mapping[str, int] = node.images
    return images.get(name, 0)


def normalized(image: str) -> str:
    """An image's name with its tag: `latest` where none is given."""
    return image if image.rfind(":") > image.rfind("/") else f"{image}:latest"
