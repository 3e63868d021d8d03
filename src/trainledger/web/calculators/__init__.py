"""The calculators, by name: first those of the lesson, then those of the planner."""

from trainledger.web.calculator import Calculator
from trainledger.web.calculators.breaks import BREAKS
from trainledger.web.calculators.data import DATA
from trainledger.web.calculators.formats import FORMATS
from trainledger.web.calculators.layouts import LAYOUTS
from trainledger.web.calculators.matmul import MATMUL
from trainledger.web.calculators.memory import MEMORY
from trainledger.web.calculators.model import MODEL_CALCULATOR
from trainledger.web.calculators.optimal import OPTIMAL
from trainledger.web.calculators.serving import SERVING
from trainledger.web.calculators.tensor import TENSOR
from trainledger.web.calculators.time import TIME

_IN_ORDER = (TIME, TENSOR, FORMATS, MATMUL, MODEL_CALCULATOR, MEMORY, DATA, OPTIMAL, LAYOUTS, BREAKS, SERVING)
CALCULATORS: dict[str, Calculator] = {calculator.name: calculator for calculator in _IN_ORDER}
LESSON = frozenset({"time", "tensor", "formats", "matmul", "model", "memory", "data"})
