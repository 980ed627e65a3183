import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.hdfs.DistributedFileSystem;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSNNTopology;
import org.apache.hadoop.hdfs.protocol.HdfsConstants.SafeModeAction;

/**
 * NameNodes and a DataNode in one process, until its standard input ends.
 *
 * <p>Arguments: a folder, and how many NameNodes; of two the first becomes the active one. A line
 * on standard input is a command, and is answered by "done": "safemode enter", "safemode leave",
 * "quota PATH NAMES BYTES", "active INDEX".
 */
public class HdfsCluster {
    public static void main(String[] arguments) throws Exception {
        int nameNodes = Integer.parseInt(arguments[1]);
        Configuration settings = new Configuration();
        // Else each close of a file waits 0.4 s for the DataNode's report, as in a large cluster.
        settings.setInt("dfs.namenode.file.close.num-committed-allowed", 1);
        settings.setInt("dfs.ha.tail-edits.period", 1);
        MiniDFSCluster.Builder builder = new MiniDFSCluster.Builder(settings, new File(arguments[0]));
        if (nameNodes > 1) {
            builder.nnTopology(MiniDFSNNTopology.simpleHATopology(nameNodes));
        }
        MiniDFSCluster cluster = builder.build();
        if (nameNodes > 1) {
            cluster.transitionToActive(0);
        }
        cluster.waitActive();
        StringBuilder ports = new StringBuilder("listening on");
        for (int index = 0; index < nameNodes; index++) {
            ports.append(" ").append(cluster.getNameNodePort(index));
        }
        System.out.println(ports);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            obey(cluster, line.split(" "));
            System.out.println("done");
        }
        cluster.shutdown();
        System.exit(0);
    }

    private static void obey(MiniDFSCluster cluster, String[] words) throws Exception {
        if (words[0].equals("active")) {
            int index = Integer.parseInt(words[1]);
            cluster.transitionToStandby(1 - index);
            cluster.transitionToActive(index);
            return;
        }
        DistributedFileSystem system = cluster.getFileSystem(0);
        if (words[0].equals("safemode")) {
            system.setSafeMode(SafeModeAction.valueOf("SAFEMODE_" + words[1].toUpperCase()));
        } else {
            system.setQuota(new Path(words[1]), Long.parseLong(words[2]), Long.parseLong(words[3]));
        }
    }
}
