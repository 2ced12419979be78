/** A program that fills and drops arrays of 512 KiB and keeps a few hundred of them. Usage: Arrays ROUNDS */
public class Arrays {
    public static void main(String[] arguments) {
        int rounds = Integer.parseInt(arguments[0]);
        byte[][] kept = new byte[400][];
        long state = 88172645463325252L;
        long sum = 0;
        for (int round = 0; round < rounds; round++) {
            state ^= state << 13;
            state ^= state >>> 7;
            state ^= state << 17;
            byte[] array = new byte[512 << 10];
            for (int index = 0; index < array.length; index += 512) {
                array[index] = (byte) (state + index);
            }
            int place = (int) ((state >>> 20) % kept.length);
            if (kept[place] != null) {
                sum += kept[place][(int) (state >>> 40) & 0x7fe00];
            }
            kept[place] = array;
        }
        System.out.println(sum);
    }
}
