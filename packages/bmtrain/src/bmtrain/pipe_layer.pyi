# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_pipeline import PipelineTransformerBlockList as PipelineTransformerBlockList
