"""Fitting the encoders, or taking over those of the version whose other days are kept."""

from __future__ import annotations

from conf.errors import ConfigError
from etl.encoders.fit import fit_encoders, take_over_encoders
from etl.stages.stage import Build, ConfigChecks, Stage


def _check(checks: ConfigChecks) -> None:
    if checks.request.refit and checks.config.output.partition_overwrite == "dynamic":
        raise ConfigError(
            "numbers cannot be fitted anew for some days of a dataset: the others would keep "
            "values of the earlier ones",
            received="--refit with output.partition_overwrite: dynamic",
            fix="build all days: --refit --set output.partition_overwrite=static, with the "
            "whole range as --date and --date-to",
        )


def _run(build: Build) -> None:
    inputs = build.inputs
    if inputs.base is not None:
        build.encoders = take_over_encoders(inputs.base[0], inputs.plan, inputs.staging)
    else:
        build.encoders = fit_encoders(
            build.events, inputs.config, inputs.plan, inputs.staging, inputs.earlier_encoders,
            inputs.request.dates,
        )  # fmt: skip
    build.checks.check_vocabularies(build.encoders.tokens)


FIT_ENCODERS = Stage("fit encoders", _run, _check)
