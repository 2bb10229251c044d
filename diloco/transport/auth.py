# SPDX-License-Identifier: Apache-2.0
"""Authentication of peers: TLS and a bearer token, read from files.

A process with a CA accepts only peers whose certificate the CA has signed, in
both directions (mTLS). A token is sent with each call and compared in constant
time. Secrets come from files, because other users of the machine can read a
command line.
"""

import dataclasses
import hmac
import pathlib
import ssl
import stat

import grpc

FILE_BYTES_MAX = 1 << 20
TOKEN_CHARS = range(16, 513)  # A shorter one can be guessed.
TOKEN_KEY = 'authorization'

Metadata = tuple[tuple[str, str], ...]


class BadAccess(ValueError):
  """A file or a flag for authentication that can't be used."""


@dataclasses.dataclass(frozen=True)
class AccessFiles:
  """The files named by a main's flags; None: not given.

  Attributes:
    tls_ca: certificates that sign those of all peers, PEM.
    tls_cert: this process's certificate, with its chain, PEM.
    tls_key: its private key, PEM, not encrypted.
    tls_name: the name that a peer's certificate must hold, instead of the host
      that is connected to.
    token_file: one line, the same for all processes of a run.
  """

  tls_ca: str | None = None
  tls_cert: str | None = None
  tls_key: str | None = None
  tls_name: str | None = None
  token_file: str | None = None


@dataclasses.dataclass(frozen=True)
class Access:
  """The credentials that this process presents to peers and requires of them.

  Attributes:
    server: TLS of what listens here; None: plain TCP.
    channel: TLS of what connects from here; None: plain TCP.
    token: sent and required with each call; None: neither.
    tls_name: see `AccessFiles`.
    knows_peers: True if servers here reject strangers.
    proxy: 'host:port' of an HTTP proxy through which gRPC connects (CONNECT);
      '': none, whatever the environment says.
  """

  server: grpc.ServerCredentials | None = None
  channel: grpc.ChannelCredentials | None = None
  token: str | None = dataclasses.field(default=None, repr=False)
  tls_name: str | None = None
  knows_peers: bool = False
  proxy: str = ''

  def shown(self) -> Metadata:
    """The metadata that a call from here carries."""
    if self.token is None:
      return ()
    return ((TOKEN_KEY, f'Bearer {self.token}'),)

  def admits(self, metadata: Metadata) -> bool:
    """Returns True if a call with this metadata presents the required token."""
    if self.token is None:
      return True
    token = dict(metadata).get(TOKEN_KEY, '')
    return hmac.compare_digest(token.encode(), f'Bearer {self.token}'.encode())


OPEN = Access()  # Every peer is accepted.


def read(files: AccessFiles, *, serves: bool, connects: bool) -> Access:
  """Reads and checks the files.

  Args:
    serves: True if this process listens for gRPC.
    connects: True if it connects by gRPC.

  Raises:
    BadAccess: a file is missing, empty, not PEM, does not match another, or is
      a secret that all users of this machine can read; or a flag is missing
      that another one needs.
  """
  _check_together(files, serves, connects)
  ca, cert, key = _read_tls(files)
  token = _read_token(files.token_file)
  server = channel = None
  if cert is not None and serves:
    server = grpc.ssl_server_credentials(
      [(key, cert)], ca, require_client_auth=ca is not None
    )
  if ca is not None and connects:
    channel = grpc.ssl_channel_credentials(ca, key, cert)
  mutual = server is not None and ca is not None
  return Access(
    server, channel, token, files.tls_name, mutual or token is not None
  )


def _check_together(files: AccessFiles, serves: bool, connects: bool) -> None:
  """Rejects half a TLS setup, which only a peer would notice, if at all."""
  rules = (
    (files.tls_cert, 'tls_cert', files.tls_key, 'tls_key', True),
    (files.tls_key, 'tls_key', files.tls_cert, 'tls_cert', True),
    (files.tls_ca, 'tls_ca', files.tls_cert, 'tls_cert', serves),
    (files.tls_cert, 'tls_cert', files.tls_ca, 'tls_ca', connects),
    (files.tls_name, 'tls_name', files.tls_ca, 'tls_ca', True),
  )
  for present, flag, other, needed, applies in rules:
    if present is not None and other is None and applies:
      raise BadAccess(f'--{flag}={present}: needs --{needed} beside it')


def _read_tls(
  files: AccessFiles,
) -> tuple[bytes | None, bytes | None, bytes | None]:
  """Returns CA, certificate and key, each None if not given."""
  ca = _read_file('tls_ca', files.tls_ca)
  cert = _read_file('tls_cert', files.tls_cert)
  key = _read_file('tls_key', files.tls_key, secret=True)
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  for flag, path, data in (
    ('tls_ca', files.tls_ca, ca),
    ('tls_cert', files.tls_cert, cert),
  ):
    if data is None:
      continue
    try:
      context.load_verify_locations(cadata=data.decode('latin-1'))
    except (ssl.SSLError, ValueError) as error:
      raise BadAccess(f'--{flag}={path}: no PEM certificate') from error
  if cert is not None:
    _check_pair(context, files)
  return ca, cert, key


def _check_pair(context: ssl.SSLContext, files: AccessFiles) -> None:
  def encrypted():
    raise BadAccess(
      f'--tls_key={files.tls_key}: is encrypted; decrypt it, and let the '
      "file's permissions protect it"
    )

  try:
    context.load_cert_chain(files.tls_cert, files.tls_key, encrypted)
  except ssl.SSLError as error:
    raise BadAccess(
      f'--tls_key={files.tls_key}: no PEM key, or not that of '
      f'--tls_cert={files.tls_cert}'
    ) from error


def _read_token(path: str | None) -> str | None:
  data = _read_file('token_file', path, secret=True)
  if data is None:
    return None
  token = data.decode('latin-1').strip()
  if not (token.isascii() and token.isprintable() and ' ' not in token):
    raise BadAccess(
      f'--token_file={path}: must hold one line of printable ASCII, no spaces'
    )
  if len(token) not in TOKEN_CHARS:
    raise BadAccess(
      f'--token_file={path}: the token has {len(token)} characters, must have '
      f'{TOKEN_CHARS[0]} to {TOKEN_CHARS[-1]}'
    )
  return token


def _read_file(
  flag: str, path: str | None, secret: bool = False
) -> bytes | None:
  """Returns the contents; None if there is no path."""
  if path is None:
    return None
  try:
    with pathlib.Path(path).open('rb') as file:
      mode = pathlib.Path(path).stat().st_mode
      data = file.read(FILE_BYTES_MAX + 1)
  except OSError as error:
    raise BadAccess(f'--{flag}={path}: {error.strerror}') from error
  if secret and mode & (stat.S_IROTH | stat.S_IWOTH):
    raise BadAccess(
      f'--{flag}={path}: every user of this machine can read or change it '
      f'(mode {stat.S_IMODE(mode):04o}); chmod 600 {path}'
    )
  if not data.strip():
    raise BadAccess(f'--{flag}={path}: is empty')
  if len(data) > FILE_BYTES_MAX:
    raise BadAccess(f'--{flag}={path}: more than {FILE_BYTES_MAX} bytes')
  return data
