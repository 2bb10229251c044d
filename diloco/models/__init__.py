# SPDX-License-Identifier: Apache-2.0
"""Models: pairs of functions on plain pytrees, with tables of axes and
roles.
"""
