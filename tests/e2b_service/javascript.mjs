// E2B's JavaScript library against the server that its environment variables name: a line of JSON says what came of it.
// Arguments: the folder with the library in node_modules, `live` or `files` (what the server keeps in a fork), and the
// environment variables of the sandbox as JSON.
import { pathToFileURL } from 'node:url'
import { readFileSync } from 'node:fs'

const folder = process.argv[2]
const live = process.argv[3] === 'live' // whether the server keeps running processes
const e2b = await import(pathToFileURL(`${folder}/node_modules/e2b/dist/index.mjs`).href)
const { Sandbox } = e2b
const found = { version: JSON.parse(readFileSync(`${folder}/node_modules/e2b/package.json`)).version }

// The name of the class of the error that a call ends with.
async function refused(call) {
  try {
    await call()
  } catch (error) {
    return error.constructor.name
  }
  return 'nothing'
}

const sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: { of: 'javascript' }, envs: JSON.parse(process.argv[4]) })

let heard = ''
const said = await sandbox.commands.run('echo out; echo err >&2; echo $NAME', {
  envs: { NAME: 'a b' },
  onStdout: (text) => { heard += text },
})
found.command = [said.stdout, said.stderr, said.exitCode, heard]
found.failed = await sandbox.commands.run('exit 7').catch((error) => [error.constructor.name, error.exitCode])
found.late = await refused(() => sandbox.commands.run('sleep 1000', { timeoutMs: 500 }))

// The library gives up by its own clock, maybe before the server ends the command.
for (let i = 0; i < 400 && (await sandbox.commands.list()).length; i++) await new Promise((resolve) => setTimeout(resolve, 50))
const cat = await sandbox.commands.run('cat; echo done', { background: true, stdin: true })
found.listed = (await sandbox.commands.list()).map((info) => info.args.at(-1))
await sandbox.commands.sendStdin(cat.pid, 'one\n')
await sandbox.commands.closeStdin(cat.pid)
found.background = (await cat.wait()).stdout

await sandbox.files.write('notes/a', 'text é')
await sandbox.files.writeFiles([{ path: '/tmp/bytes', data: new Uint8Array([0, 255, 10]).buffer }])
found.bytes = [...(await sandbox.files.read('/tmp/bytes', { format: 'bytes' }))]
found.stream = await new Response(await sandbox.files.read('notes/a', { format: 'stream' })).text()
found.entries = (await sandbox.files.list('.', { depth: 2 })).map((entry) => [entry.path, entry.type])
await sandbox.files.rename('notes/a', 'notes/b')
found.moved = [await sandbox.files.exists('notes/a'), await sandbox.files.read('notes/b')]
await sandbox.files.makeDir('empty')
const events = []
const watch = await sandbox.files.watchDir('.', (event) => { events.push(`${event.type} ${event.name}`) })
await sandbox.files.write('new', '1')
await sandbox.files.remove('empty')
for (let i = 0; i < 200 && events.length < 3; i++) await new Promise((resolve) => setTimeout(resolve, 50))
await watch.stop()
found.events = events.sort()
found.gone = await refused(() => sandbox.files.read('gone'))
found.signed = (await fetch(await sandbox.downloadUrl('notes/b', { useSignatureExpiration: 60 }), {
  headers: { 'E2b-Sandbox-Id': sandbox.sandboxId },
})).status

const page = await Sandbox.list({ query: { metadata: { of: 'javascript' } } }).nextItems()
found.list = page.map((info) => [info.sandboxId === sandbox.sandboxId, info.state])
await sandbox.setTimeout(1_000_000)
const info = await sandbox.getInfo()
found.seconds = (info.endAt - Date.now()) / 1000
found.running = await sandbox.isRunning()

const server = await sandbox.commands.run('while :; do sleep 0.1; done', { background: true })
const forks = await sandbox.fork({ count: 2, timeoutMs: 60_000 })
await forks[0].files.write('notes/b', 'first')
found.forks = await Promise.all(forks.map(async (fork) => [
  await fork.files.read('notes/b'),
  (await fork.commands.list()).map((one) => one.pid === server.pid),
]))
for (const fork of forks) await fork.kill()

found.paused = [await sandbox.pause(), await sandbox.pause()]
found.state = (await sandbox.getInfo()).state
const resumed = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 60_000 })
found.resumed = [await resumed.files.read('notes/b'), (await resumed.commands.list()).map((one) => one.pid === server.pid)]
found.killed = live && await resumed.commands.kill(server.pid)

const snapshot = await resumed.createSnapshot()
await resumed.files.write('notes/b', 'new')
const old = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
found.snapshot = await old.files.read('notes/b')
found.deleted = [await Sandbox.deleteSnapshot(snapshot.snapshotId), await Sandbox.deleteSnapshot(snapshot.snapshotId)]
await old.kill()

found.strange = await refused(() => Sandbox.create({ apiKey: 'e2b_unknown' }))
found.keyless = (await fetch(`${process.env.E2B_API_URL}/v2/sandboxes`)).status
found.template = await refused(() => Sandbox.create('nothing'))
found.terminal = await refused(() => resumed.pty.create({ rows: 1, cols: 1, onData: () => {} }))
found.ended = [await resumed.kill(), await Sandbox.kill(resumed.sandboxId), await resumed.isRunning()]
found.after = await refused(() => resumed.commands.run('true'))
console.log(JSON.stringify(found))
