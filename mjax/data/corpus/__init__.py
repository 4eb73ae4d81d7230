"""Text from files, document by document; jobs that process it in tasks; near-duplicates."""
