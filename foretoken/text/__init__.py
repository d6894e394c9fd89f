"""Between characters and the model: tokenizers, chat templates, grammars, logit processors, sampling."""
