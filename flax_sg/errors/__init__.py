"""Every exception of the library, each with a program that fails and its fix.

Each class is a :class:`FlaxSGError` and also the built-in exception that a reader
would expect, so ``except ValueError`` works as well as ``except FlaxSGError``.
"""

from flax_sg.errors.asserts import DifferentProgramError as DifferentProgramError
from flax_sg.errors.asserts import FlowExpectationError as FlowExpectationError
from flax_sg.errors.asserts import NeverTracedError as NeverTracedError
from flax_sg.errors.asserts import ReportArgumentsError as ReportArgumentsError
from flax_sg.errors.asserts import TracedAgainError as TracedAgainError
from flax_sg.errors.base import FlaxSGError as FlaxSGError
from flax_sg.errors.base import UnsupportedVersionError as UnsupportedVersionError
from flax_sg.errors.cotangents import CopyCycleError as CopyCycleError
from flax_sg.errors.cotangents import CotangentShapeError as CotangentShapeError
from flax_sg.errors.cotangents import CotangentValueError as CotangentValueError
from flax_sg.errors.cotangents import ForwardModeError as ForwardModeError
from flax_sg.errors.cotangents import MissingVariableError as MissingVariableError
from flax_sg.errors.cotangents import NoCotangentError as NoCotangentError
from flax_sg.errors.cotangents import SplitSelectionError as SplitSelectionError
from flax_sg.errors.cotangents import TracerInRuleError as TracerInRuleError
from flax_sg.errors.flow import DerivedFilterError as DerivedFilterError
from flax_sg.errors.flow import FlowNameError as FlowNameError
from flax_sg.errors.flow import NoOutputError as NoOutputError
from flax_sg.errors.flow import NotTracedError as NotTracedError
from flax_sg.errors.flow import ValueNeededError as ValueNeededError
from flax_sg.errors.parts import FrozenLayersError as FrozenLayersError
from flax_sg.errors.parts import PartError as PartError
from flax_sg.errors.selection import FilterTypeError as FilterTypeError
from flax_sg.errors.selection import FilterValueError as FilterValueError
from flax_sg.errors.selection import TracerInFilterError as TracerInFilterError
from flax_sg.errors.selection import TreeFilterError as TreeFilterError
from flax_sg.errors.selection import UnusedFilterError as UnusedFilterError
from flax_sg.errors.trees import AbsentLeafError as AbsentLeafError
from flax_sg.errors.trees import ChangedValueError as ChangedValueError
from flax_sg.errors.trees import DeclarationError as DeclarationError
from flax_sg.errors.trees import MissingLeafError as MissingLeafError
from flax_sg.errors.trees import NotDifferentiableError as NotDifferentiableError
from flax_sg.errors.trees import NotFrozenError as NotFrozenError
from flax_sg.errors.trees import OverlapError as OverlapError
from flax_sg.errors.trees import StructureError as StructureError
from flax_sg.errors.trees import UnboundModuleError as UnboundModuleError
from flax_sg.errors.trees import UnclassifiedLeafError as UnclassifiedLeafError
from flax_sg.errors.use import BlockLeakError as BlockLeakError
from flax_sg.errors.use import BlockOrderError as BlockOrderError
from flax_sg.errors.use import KeptValueError as KeptValueError
from flax_sg.errors.use import LateReadError as LateReadError
from flax_sg.errors.use import LiftTargetError as LiftTargetError
from flax_sg.errors.use import NothingReadError as NothingReadError
from flax_sg.errors.use import NothingStoppedWarning as NothingStoppedWarning
from flax_sg.errors.use import OverwriteWithGradientError as OverwriteWithGradientError
from flax_sg.errors.use import ReloadError as ReloadError
from flax_sg.errors.use import SummaryTargetError as SummaryTargetError
from flax_sg.errors.use import UnknownCollectionError as UnknownCollectionError
from flax_sg.errors.use import UnknownMethodError as UnknownMethodError
from flax_sg.errors.use import warn_without_effect as warn_without_effect
from flax_sg.errors.wrap import ChoiceError as ChoiceError
from flax_sg.errors.wrap import MirrorVariablesError as MirrorVariablesError
from flax_sg.errors.wrap import ScanMemoryWarning as ScanMemoryWarning
from flax_sg.errors.wrap import WrappedModuleError as WrappedModuleError
from flax_sg.errors.wrap import WrapperNameError as WrapperNameError
from flax_sg.errors.writes import ReadOnlyError as ReadOnlyError
from flax_sg.errors.writes import SubstituteError as SubstituteError
from flax_sg.errors.writes import SubstituteTypeError as SubstituteTypeError
from flax_sg.errors.writes import UnusedSubstituteError as UnusedSubstituteError
