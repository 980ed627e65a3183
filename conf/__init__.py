"""The contract between the two sides: schema, manifest, paths, typed configs, errors."""
