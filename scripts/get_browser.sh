#!/bin/sh
# A headless Chromium and axe-core for tests/server/test_page_browser.py, from the npm registry, into .browser.
# Needs node and npm. The browser is that of @sparticuz/chromium (MIT), unpacked by its own script.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .browser
npm install --no-save --no-audit --no-fund --prefix .browser @sparticuz/chromium@153.0.0 axe-core@4.14.1
cd .browser
TMPDIR="$PWD" node --input-type=module -e '
import chromium from "@sparticuz/chromium";
console.log(await chromium.executablePath());
'
