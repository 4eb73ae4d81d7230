"""Text from files, document by document; jobs that process it in tasks; near-duplicates."""

from mjax.data.corpus.documents import Document as Document
from mjax.data.corpus.documents import MalformedLines as MalformedLines
from mjax.data.corpus.documents import ShingleUnit as ShingleUnit
from mjax.data.corpus.documents import TextFiles as TextFiles
from mjax.data.corpus.documents import find_files as find_files
from mjax.data.corpus.documents import parse_block as parse_block
