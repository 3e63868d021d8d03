# `make run` and `make test` are all the set-up: each makes .venv, installs into it, and does its job.

.PHONY: run test test-torch test-slow lint check bench

run:            ## forecast, train, sample and reconcile a small run (about six minutes, installation included)
	@./install all
	@.venv/bin/trainledger demo

test:           ## the tests, in two processes of one thread each
	@./install dev
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

test-torch:     ## the same with another torch, in a .venv of its own: make test-torch VERSION=2.11.0
	@test -n "$(VERSION)" || { echo "say which torch: make test-torch VERSION=2.11.0" >&2; exit 2; }
	@TORCH=$(VERSION) ./install dev
	@OMP_NUM_THREADS=1 .venv-torch-$(VERSION)/bin/python -m pytest -n 2

test-slow:      ## those that take longer: 30 kills, a corpus of 1 GB, compiled resume
	@./install dev
	@.venv/bin/python -m pytest -m slow -s

lint:           ## format, lint, types
	@./install dev
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy

check: lint test

bench:          ## start-up time, accounts and layouts per second, predicted and measured step times (some minutes)
	@./install dev
	@.venv/bin/python bench/startup.py
	@.venv/bin/python bench/ledger.py
	@OMP_NUM_THREADS=1 .venv/bin/python bench/plan.py
	@OMP_NUM_THREADS=1 .venv/bin/python bench/step_time.py
	@OMP_NUM_THREADS=1 .venv/bin/python bench/trace.py --beside
