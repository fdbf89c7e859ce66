#!/bin/bash
exec "${PYTHON:-python3}" "$(dirname "$0")/campaign.py" "$@" # what it does is written there
