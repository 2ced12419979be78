// Buffers of 4 to 63 MiB, as a server has them that takes files apart, every second one zeroed. Usage: buffers.js ROUNDS
"use strict";

const rounds = Number(process.argv[2]);
const kept = new Array(16);
let state = 12345;
let sum = 0;

for (let round = 0; round < rounds; round++) {
  state = (Math.imul(state, 1103515245) + 12345) >>> 0;
  const size = (4 + ((state >>> 4) % 60)) << 20;
  const buffer = round % 2 ? Buffer.alloc(size) : Buffer.allocUnsafe(size);
  for (let index = 0; index < buffer.length; index += 4096) buffer[index] = round + index;
  const place = (state >>> 8) % kept.length;
  if (kept[place]) sum += kept[place][4096 * ((state >>> 16) % 1024)];
  kept[place] = buffer;
}
console.log(sum);
