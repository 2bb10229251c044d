# SPDX-License-Identifier: Apache-2.0
"""The style sheet of a page: light and dark, for wide and narrow screens."""

STYLE = """
:root {
  --paper: #ffffff; --ink: #1d2127; --faint: #5d6672; --line: #d8dce2;
  --stripe: #f5f6f8; --link: #0b5cad; --warn: #fff3d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --ink: #e4e7eb; --faint: #9aa4b1; --line: #363c45;
    --stripe: #1c2026; --link: #7ab8f5; --warn: #43350c;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body {
  margin: 0 auto; max-width: 68rem; padding: 1.5rem clamp(0.8rem, 3vw, 2rem);
  background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.8rem; }
h2 { font-size: 1.15rem; margin: 0 0 0.7rem; }
header p { max-width: 46rem; margin: 0.5rem 0; }
a { color: var(--link); }
pre {
  background: var(--stripe); border: 1px solid var(--line);
  border-radius: 6px; margin: 0.4rem 0; overflow-x: auto;
  padding: 0.6rem 0.8rem;
}
code { font: 0.88rem/1.5 ui-monospace, monospace; }
nav { border-bottom: 1px solid var(--line); margin: 1.2rem 0 0; }
nav ol { columns: 22rem; margin: 0 0 1rem; padding-left: 1.4rem; }
section { margin: 2.2rem 0; scroll-margin-top: 1rem; }
.scroll { border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
table {
  border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 0.92rem; width: 100%;
}
th, td { padding: 0.35rem 0.8rem; text-align: left; white-space: nowrap; }
thead th {
  border-bottom: 2px solid var(--line); color: var(--faint);
  font-weight: 600; vertical-align: bottom; white-space: normal;
}
tbody th { font-weight: 500; }
tbody tr:nth-child(even) { background: var(--stripe); }
.number { text-align: right; white-space: pre; }
thead .number { white-space: normal; }
figure {
  background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  margin: 0; overflow-x: auto; padding: 0.5rem;
}
img { display: block; height: auto; margin: 0 auto; max-width: 100%; }
figure.chart img, figure.intervals img {
  max-width: none; min-width: 34rem; width: min(100%, 48rem);
}
figure.timeline img { max-width: none; min-width: 44rem; width: 100%; }
.notes { color: var(--faint); font-size: 0.9rem; margin: 0.7rem 0 0; }
.save { font-size: 0.85rem; margin: 0.4rem 0 0; }
.missing { background: var(--warn); border-radius: 6px; padding: 0.6rem; }
@media print { nav, .save { display: none; } section { break-inside: avoid; } }
"""
