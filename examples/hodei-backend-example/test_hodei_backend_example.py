"""The backend keeps the contract of `hodei.ports.Backend`: `pytest`, in an environment with Hodei and this package."""

from hodei_backend_example import Settings, make

from hodei.testing import BackendConformance, backend_context


class TestExampleBackend(BackendConformance):
    shared_files = True

    def make_backend(self, home):
        return make("desk", Settings(cpus=2), backend_context(home))
