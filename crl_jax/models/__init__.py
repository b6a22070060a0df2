"""Language models, tokenizers, chat templates, weight files and the sentence embedder. Import the module you need."""
