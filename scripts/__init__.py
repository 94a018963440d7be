# SPDX-License-Identifier: Apache-2.0
"""A package, because verl's wheel installs one of the same name, which would hide a plain folder."""
