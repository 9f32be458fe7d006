"""On PYTHONPATH while tests run through a reverse proxy: every process that they start learns of it before its first line."""

from tests.support.through_proxy import install

install()
