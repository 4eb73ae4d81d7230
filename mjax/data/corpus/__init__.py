"""Text from files, document by document; the tasks of commands that read it; duplicates and evaluation text in it."""

from mjax.data.corpus.documents import Document as Document
from mjax.data.corpus.documents import MalformedLines as MalformedLines
from mjax.data.corpus.documents import TextFiles as TextFiles
from mjax.data.corpus.documents import Unit as Unit
from mjax.data.corpus.documents import find_files as find_files
from mjax.data.corpus.documents import parse as parse
