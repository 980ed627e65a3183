"""The contract between the two sides: schema, manifest, typed configs, errors."""
