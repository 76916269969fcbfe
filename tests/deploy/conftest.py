"""The servers over fake engines that the tests of the services have."""

from tests.service.conftest import bare, stack  # noqa: F401
