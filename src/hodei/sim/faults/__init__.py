"""FAULTS: the real controller and the real store among backends that break, lie and forget, one seed after another.

`scene` draws what exists and what goes wrong, `backend` is the fake world, `server` drives the controller as a server would
(and dies like one), `audit` checks what must hold after every step, `life` is one whole run. No part of it imports
`runtime` or `backends`: it shows that the core is right, not that the asyncio drivers around it are.
"""
