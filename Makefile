# `make run` and `make test` are all the set-up: each makes .venv, installs into it, and does its job.

.PHONY: run test test-all test-torch lecture lecture-site lint check bench fuzz browser loops programs screenshots

PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

run:            ## forecast, train, sample and reconcile a small run (about six minutes, installation included)
	@./install all
	@.venv/bin/trainledger demo

test:           ## unit tests, sweeps and tests with torch, in two processes of one thread each
	@./install dev
	@$(PYTEST) --cost unit,sweep,torch
	@LECTURE_QUICK=1 $(PYTEST) lecture -k "not top_to_bottom"

test-all:       ## every test: also agreement over matrices, published figures, processes killed, and what takes minutes
	@./install dev
	@$(PYTEST) tests lecture
	@.venv/bin/python -m pytest -m slow -s

test-torch:     ## all but the slow ones with another torch, in a .venv of its own: make test-torch VERSION=2.11.0
	@test -n "$(VERSION)" || { echo "say which torch: make test-torch VERSION=2.11.0" >&2; exit 2; }
	@TORCH=$(VERSION) ./install dev
	@OMP_NUM_THREADS=1 .venv-torch-$(VERSION)/bin/python -m pytest -n 2

lecture:        ## the lecture's claims, exercises and experiments at full size (lecture/README.md)
	@./install dev
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 lecture

lecture-site:   ## the page and the lecture as static files that run in a browser (some minutes a chapter; needs a Chromium and npm)
	@./install browser
	@[ -d .venv/pyodide-lecture/node_modules/pyodide ] || npm install --silent --prefix .venv/pyodide-lecture pyodide@314.0.0
	@.venv/bin/trainledger serve --export site --pyodide .venv/pyodide-lecture/node_modules/pyodide
	@.venv/bin/python tools/lecture_site.py site/lecture --pyodide .venv/pyodide-lecture/node_modules/pyodide

lint:           ## format, lint, types
	@./install dev
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy

check:          ## format, lint, types, unit tests, tests of the rooms that changed: before every commit
	@./check

bench:          ## start-up time, accounts and layouts per second, step times, the page (some minutes)
	@./install dev
	@.venv/bin/python bench all

fuzz:           ## odd values of every flag, then the page's API: schemathesis and hostile texts (some minutes)
	@./install fuzz
	@.venv/bin/python -m pytest -q tests/cli/test_odd_values.py tests/cli/test_files_of_verbs.py
	@.venv/bin/python tools/fuzz_api.py

browser:        ## the page in a real browser: every calculator, links, exercises, access (needs a Chromium and npm)
	@./install browser
	@[ -d .venv/axe/node_modules/axe-core ] || npm install --silent --prefix .venv/axe axe-core@4
	@[ -d .venv/pyodide/node_modules/pyodide ] || npm install --silent --prefix .venv/pyodide pyodide@314
	@.venv/bin/python -m pytest -n 2 --cost process tests/browser

loops:          ## the meter in the Trainers of transformers and Lightning, and its planted faults
	@./install loops
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/observe/meter

programs:       ## programs of others as they are, with their figures: make programs PROGRAMS_DIR=~/src (docs/programs.md)
	@./install programs
	@OMP_NUM_THREADS=1 .venv-programs/bin/python tools/programs/programs.py --write $(if $(PROGRAMS_DIR),--sources $(PROGRAMS_DIR))

screenshots:    ## docs/images: every calculator wide and light, narrow and dark (needs a Chromium and playwright)
	@./install browser
	@.venv/bin/python tools/screenshots.py
