// The coding agent opencode: a session that writes a file by a call of its tool.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const home = mkdtempSync(join(tmpdir(), "opencode-"));
const config = {
  $schema: "https://opencode.ai/config.json",
  autoupdate: false,
  share: "disabled",
  permission: { edit: "allow" },
  provider: {
    ttserve: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: process.argv[2], apiKey: "none" },
      models: { demo: { limit: { context: 200000, output: 4096 } } },
    },
  },
};
writeFileSync(join(home, "opencode.json"), JSON.stringify(config));
const program = join(process.cwd(), "node_modules", ".bin", "opencode");
const environment = { ...process.env, HOME: home, PWD: home, XDG_DATA_HOME: home, XDG_CONFIG_HOME: home, XDG_CACHE_HOME: home };
const options = { cwd: home, env: environment, stdio: ["ignore", "pipe", "inherit"], encoding: "utf8", timeout: 120000 };
try {
  execFileSync(program, ["run", "--model", "ttserve/demo", "Write hello.txt"], options);
  assert.equal(readFileSync(join(home, "hello.txt"), "utf8"), "Hi.");
} finally {
  rmSync(home, { recursive: true });
}
