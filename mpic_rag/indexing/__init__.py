"""From folders of PDFs, pages and pictures to passages that can be retrieved and compiled."""
