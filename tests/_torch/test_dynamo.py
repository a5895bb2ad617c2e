"""Settings of Dynamo while a step is captured."""

import json
import logging

import torch

from pfeife._torch.dynamo import willing


def test_settings_go_into_torchs_log():
    """torch 2.11 writes all of them as JSON, and sorts sets: functions have names there."""
    with willing():
        settings = torch._dynamo.config
        assert print in settings.ignore_logging_functions
        assert logging.warning in set(settings.ignore_logging_functions)
        names = settings.get_config_copy()["ignore_logging_functions"]
        assert {"print", "warning"} <= {*json.loads(json.dumps(names))}
