#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Made the certificates beside it, which are for tests only: the lines of
# docs/security.md, once for "our" run and once for strangers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

page_lines() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$DAYS" -subj /CN=diloco-ca -keyout ca.key -out ca.pem
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=diloco -keyout run.key -out run.csr
  openssl x509 -req -in run.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days "$DAYS" -extfile <(echo subjectAltName=DNS:diloco,IP:127.0.0.1) -out run.pem
  openssl rand -hex 32 > run.token && chmod 600 ca.key run.key run.token
}

for folder in ours strangers; do
  mkdir -p "$folder"
  (cd "$folder" && DAYS=36500 page_lines && rm -f ca.key run.csr ca.srl)
done
