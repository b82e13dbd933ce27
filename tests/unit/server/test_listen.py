"""The listening socket of a server."""

from __future__ import annotations

import pytest
from msgspec import structs

from hodei.model.config import Config, ServerConfig
from hodei.model.errors import Conflict
from hodei.server.__main__ import _listen


def test_two_servers_that_start_at_once_do_not_share_a_port() -> None:
    with _listen(Config(server=ServerConfig(port=0)), any_port=True) as first:
        port = first.getsockname()[1]
        config = Config(server=structs.replace(ServerConfig(), port=port))
        with _listen(config, any_port=True) as second:
            assert second.getsockname()[1] != port
        with pytest.raises(Conflict, match=f"cannot listen on 127.0.0.1:{port}"):
            _listen(config, any_port=False)
