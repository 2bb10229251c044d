# SPDX-License-Identifier: Apache-2.0
"""A bucket of Google Cloud Storage in this process.

TensorStore and gcsfs reach it by HTTP, in as much of the JSON API as they use
here. Where gcsfs is not installed, `StandIn` takes its place for etils.epath.
"""

import contextlib
import http.server
import importlib.util
import io
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator

import fsspec

BUCKET = 'bucket'
_PATH = re.compile(
  r'(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?'
)


class Objects:
  """The bucket: name -> (generation, bytes)."""

  def __init__(self):
    self._lock, self._last = threading.Lock(), 0
    self.found: dict[str, tuple[int, bytes]] = {}

  def put(self, name: str, data: bytes, expected: str | None = None) -> bool:
    """Stores an object; False if its generation is not the one expected."""
    with self._lock:
      if expected not in (None, str(self.found.get(name, (0,))[0])):
        return False
      self._last += 1
      self.found[name] = self._last, bytes(data)
      return True

  def under(self, prefix: str, delimiter: str) -> tuple[list, list]:
    """Returns names and prefixes, as the API lists them."""
    names, prefixes = [], set()
    for name in sorted(self.found):
      if name.startswith(prefix):
        head, cut, _ = name[len(prefix) :].partition(delimiter or '\0')
        prefixes |= {prefix + head + cut} if cut else set()
        names += [] if cut else [name]
    return names, sorted(prefixes)


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers from `server.objects`."""

  protocol_version = 'HTTP/1.1'

  def log_message(self, *_):
    pass

  def _answer(self, code: int, body: bytes = b'', **headers: str):
    self.send_response(code)
    headers['content-length'] = str(len(body))
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.end_headers()
    self.wfile.write(body)

  def _json(self, value: dict):
    self._answer(
      200, json.dumps(value).encode(), content_type='application/json'
    )

  def _entry(self, name: str) -> dict:
    generation, data = self.server.objects.found[name]
    time = '2026-01-01T00:00:00.000Z'
    return {
      'name': name,
      'bucket': BUCKET,
      'size': str(len(data)),
      'generation': str(generation),
      'updated': time,
      'timeCreated': time,
    }

  def do_GET(self):
    self._do(self._get)

  def do_POST(self):
    self._do(self._post)

  do_PUT = do_POST

  def do_DELETE(self):
    self._do(self._delete)

  def _do(self, method):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    body = self.rfile.read(int(self.headers.get('content-length', 0)))
    bucket, name = _PATH.fullmatch(url.path).groups()
    name = urllib.parse.unquote(name) if name else query.get('name')
    known = name in self.server.objects.found or method != self._get
    if bucket != BUCKET or (name and not known):
      self._answer(404, b'{"error": {"message": "there is none"}}')
    else:
      method(name, query, body)

  def _get(self, name: str | None, query: dict, body: bytes):
    if name is None and not self.path.partition('?')[0].endswith('/o'):
      self._json({'name': BUCKET})
    elif name is None:
      delimiter = query.get('delimiter', '')
      under = self.server.objects.under(query.get('prefix', ''), delimiter)
      items = [self._entry(each) for each in under[0]]
      self._json({'items': items, 'prefixes': under[1]})
    elif query.get('alt') != 'media':
      self._json(self._entry(name))
    else:
      generation, data = self.server.objects.found[name]
      tag = {'x_goog_generation': str(generation)}
      if query.get('ifGenerationNotMatch') == str(generation):
        self._answer(304, **tag)
      elif match := re.fullmatch(
        r'bytes=(\d+)-(\d*)', self.headers.get('range', '')
      ):
        first, last = int(match[1]), int(match[2] or len(data) - 1)
        part, size = data[first : last + 1], len(data)
        end = first + len(part) - 1
        tag['content_range'] = f'bytes {first}-{end}/{size}'
        self._answer(206, part, **tag)
      else:
        self._answer(200, data, **tag)

  def _post(self, name: str | None, query: dict, body: bytes):
    if query['uploadType'] == 'resumable':
      name = name or json.loads(body)['name']
      to = self.headers['host'], self.path.partition('?')[0]
      at = urllib.parse.urlencode({'uploadType': 'put', 'name': name})
      self._answer(200, location=f'http://{"".join(to)}?{at}')
      return
    if self.server.objects.put(name, body, query.get('ifGenerationMatch')):
      self._json(self._entry(name))
    else:
      self._answer(412)

  def _delete(self, name: str, query: dict, body: bytes):
    gone = self.server.objects.found.pop(name, None)
    self._answer(204 if gone else 404)


class _Written(io.BytesIO):
  """A file that becomes an object when it is closed."""

  def __init__(self, objects: Objects, name: str):
    super().__init__()
    self._objects, self._name = objects, name

  def close(self):
    if not self.closed:
      self._objects.put(self._name, self.getvalue())
    super().close()


class StandIn(fsspec.AbstractFileSystem):
  """A stand-in for gcsfs, with what etils.epath calls."""

  protocol = ('gcs', 'gs')
  cachable = False
  objects: Objects

  def ls(self, path, detail=True, **_):
    bucket, _, prefix = self._strip_protocol(path).partition('/')
    prefix += '/' * bool(prefix)
    names, prefixes = self.objects.under(prefix, '/')
    if bucket != BUCKET or not names + prefixes:
      raise FileNotFoundError(path)
    found = [
      *((f'{bucket}/{p[:-1]}', 'directory', 0) for p in prefixes),
      *(
        (f'{bucket}/{n}', 'file', len(self.objects.found[n][1])) for n in names
      ),
    ]
    rows = [dict(zip(('name', 'type', 'size'), each)) for each in found]
    return rows if detail else [each['name'] for each in rows]

  def info(self, path, **_):
    path = self._strip_protocol(path)
    name = path.partition('/')[2]
    if name in self.objects.found:
      size = len(self.objects.found[name][1])
      return {'name': path, 'type': 'file', 'size': size}
    self.ls(path)
    return {'name': path, 'type': 'directory', 'size': 0}

  def mkdir(self, path, create_parents=True, **_):
    pass  # There are no folders.

  makedirs = mkdir

  def rm(self, path, recursive=False, maxdepth=None):
    name, found = (
      self._strip_protocol(path).partition('/')[2],
      self.objects.found,
    )
    gone = [n for n in found if recursive and n.startswith(name + '/')]
    gone += [name] * (name in found)
    if not gone:
      raise FileNotFoundError(path)
    for each in gone:
      del found[each]

  def _open(self, path, mode='rb', **_):
    bucket, _, name = path.partition('/')
    if bucket != BUCKET or (mode == 'rb' and name not in self.objects.found):
      raise FileNotFoundError(path)
    if mode == 'rb':
      return io.BytesIO(self.objects.found[name][1])
    return _Written(self.objects, name)


@contextlib.contextmanager
def served() -> Iterator[Objects]:
  """Serves gs://bucket to this process."""
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  objects = server.objects = StandIn.objects = Objects()
  threading.Thread(target=server.serve_forever, daemon=True).start()
  url = f'http://127.0.0.1:{server.server_port}'
  if importlib.util.find_spec('gcsfs') is None:
    fsspec.register_implementation('gcs', StandIn, clobber=True)
  names = ('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL')
  os.environ.update(dict.fromkeys(names, url))
  os.environ['GOOGLE_AUTH_TOKEN_FOR_TESTING'] = 'token'
  try:
    yield objects
  finally:
    for name in (*names, 'GOOGLE_AUTH_TOKEN_FOR_TESTING'):
      del os.environ[name]
    server.shutdown()
    server.server_close()
